"""Losses per token, neither masked nor averaged: `aggregate` does both. Read `policy.py` first."""
