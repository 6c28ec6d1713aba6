"""What a pool and its processes say to one another."""

import struct
from dataclasses import dataclass

from hybridflow.config.reward import Reward
from hybridflow.rewards.interface import Outcome

COMMAND = struct.Struct("<ci")
"""A command and a number: `S` with a socket's descriptor starts a process and answers with its id; `E` with the id ends
it and answers with the status it ended with."""


@dataclass(frozen=True)
class Setup:
    """What a process must know: the functions, and where Python finds modules."""

    config: Reward
    path: list[str]


@dataclass(frozen=True)
class Ready:
    """The functions are there."""

    code: dict[str, str]
    """The user's files that were imported for them, with their SHA-256."""


@dataclass(frozen=True)
class Unusable:
    """The functions are not."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """A call that raised."""

    message: str
    trace: str
    of_all: bool = False
    """For no sample of its own: none would fare better alone."""


Answer = Ready | Unusable | Raised | Outcome
"""Sent in a pair with the number of the question: 0 for whether the functions are there, then 1, 2, ..."""
