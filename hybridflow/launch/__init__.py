"""Turns a configuration into a running system. Read `compose/compose.py`, `plan/plan.py`, then `assemble.py`."""
