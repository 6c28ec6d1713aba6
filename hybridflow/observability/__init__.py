"""The output of a run: metrics, logs, the progress line, sample tables, trackers and the report.

Read `metrics.py` first, then `trackers/interface.py`, then `report/__init__.py`. Only `dataflows/loop.py` sends
anything to trackers; lower layers return metrics.
"""
