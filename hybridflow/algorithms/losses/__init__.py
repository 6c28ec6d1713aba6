"""Losses per token or per response, not averaged: see `aggregate`. Read `policy.py` first."""
