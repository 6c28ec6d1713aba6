"""Where numbers and samples go. Read `interface.py`, then `factory.py` (names -> trackers)."""
