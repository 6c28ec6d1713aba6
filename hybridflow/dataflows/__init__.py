"""Algorithms as programs over roles. Read `ppo.py` first, then `interface.py` and `loop.py`."""
