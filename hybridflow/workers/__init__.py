"""Roles: an engine, an objective, and the methods the driver may call. Read `actor.py` first."""
