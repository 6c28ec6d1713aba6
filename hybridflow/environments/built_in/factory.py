"""The built-in environments by name."""

from collections.abc import Callable

from hybridflow.environments.built_in.calculator import CalculatorTool
from hybridflow.environments.built_in.frozen_lake import FrozenLake
from hybridflow.environments.built_in.guess_number import GuessNumber
from hybridflow.environments.built_in.kuhn_poker import kuhn_poker
from hybridflow.environments.built_in.tools import Tools

BUILT_IN: dict[str, Callable[..., object]] = {
    "guess_number": GuessNumber,
    "calculator": CalculatorTool,
    "frozen_lake": FrozenLake,
    "kuhn_poker": kuhn_poker,
    "tools": Tools,
}
"""Classes with `reset` and `step`, and coroutine functions of (model, row)."""
