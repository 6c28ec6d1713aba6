"""Examinations of the directory of a run. Read `directory.py` first, then `all.py`."""
