"""Checks of this machine, one file per kind. Read `all.py` first."""
