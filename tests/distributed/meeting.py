"""Reward functions of runs that must go at the same time, and one that fails."""

MEETING = """
import pathlib, time

def _met(mine, other):
    pathlib.Path(mine).touch()
    until = time.monotonic() + 100
    while not pathlib.Path(other).exists():
        assert time.monotonic() < until, f"{other} does not run at the same time"
        time.sleep(0.05)

def first(completions, **columns):
    _met("first", "second")
    return [1.0 for _ in completions]

def second(completions, **columns):
    _met("second", "first")
    return [0.5 for _ in completions]

def third(completions, **columns):
    raise ValueError("no judgement")
"""
"""A file whose functions `first` and `second` each wait until the other has been called."""
