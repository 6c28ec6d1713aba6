"""Environments that raise what is not an `Exception`, or leave their process without a standard output."""

import asyncio
import sys


class Stops(BaseException):
    """An exception that is not an `Exception`."""


class Mute(RuntimeError):
    """An exception without a text."""

    def __str__(self):
        raise ValueError


class Raises:
    """Raises in its step what the setting says."""

    def __init__(self, kind: str = "Stops"):
        self.error = {"CancelledError": asyncio.CancelledError, "Stops": Stops, "Mute": Mute}[kind]

    def reset(self, row):
        return None

    def step(self, action):
        raise self.error("no more")


class Silent:
    """Closes its standard output, or removes it."""

    def __init__(self, removes: bool = False):
        self.removes = removes

    def reset(self, row):
        return None

    def step(self, action):
        sys.stdout.close()
        if self.removes:
            sys.stdout = None
        return "", 4.0, True, {}
