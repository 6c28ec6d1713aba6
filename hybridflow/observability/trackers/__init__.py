"""Destinations of metrics and samples. Read `interface.py`, then `factory.py` (names -> trackers)."""
