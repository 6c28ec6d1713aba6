"""A reward function together with how it is to be called."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.config.user_code import ending_forks
from hybridflow.errors import RewardError
from hybridflow.rewards.dialects import Answers, Dialect
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.signatures import Parameters
from hybridflow.rewards.tracing import described


@dataclass(frozen=True)
class BoundReward:
    """`setting` is what the user wrote in reward.functions, without secrets, `label` the short name that metrics carry.

    `is_trusted`: it answers soon and cannot bring its process down, so that it needs none of its own.
    """

    setting: str
    label: str
    function: Callable[..., object]
    parameters: Parameters
    dialect: Dialect
    is_trusted: bool = False

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns of the data that the function cannot do without."""
        return self.parameters.required - set(self.dialect.offers) if self.dialect.columns else frozenset()

    @property
    def is_async(self) -> bool:
        """Whether it answers with a coroutine."""
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)

    def __call__(self, samples: Samples) -> Answers:
        """The function's answers to some samples; whatever it raises, SystemExit too, becomes a `RewardError`.

        The function gets containers of its own, so it cannot change the samples. A process that it forks ends where
        the function returns.
        """
        try:
            with ending_forks():
                return self.dialect.call(self.function, self.parameters, samples.copied())
        except RewardError as error:  # a function of ours, which knows better what to do
            raise type(error)(f"{error.message} {error.remedy}", remedy=error.remedy) from None
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"it raised {described(error)}.", remedy="Fix the function; for a sample it cannot score, return None."
            ) from error
