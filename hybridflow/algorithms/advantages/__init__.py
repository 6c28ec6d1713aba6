"""Advantage estimators, one a file. Read `gae.py` (needs a critic) or `group_relative.py` (needs siblings) first."""
