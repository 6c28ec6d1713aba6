"""Advantage estimators, one per file. Read `gae.py` (with a critic) or `group_relative.py` (without) first."""
