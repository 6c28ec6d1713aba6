"""Numbers and words that leave the system: metrics, timers, the progress line, sample tables, trackers, the report.

Read `metrics.py` first (what a number is), then `trackers/interface.py` (where numbers go), then `report.py`.
Only `dataflows/loop.py` sends anything to trackers; the floors below return metrics.
"""
