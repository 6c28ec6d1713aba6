"""Configuration to a running system. Read `compose.py`, then `assemble.py`."""
