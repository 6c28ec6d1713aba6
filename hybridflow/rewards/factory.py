"""The built-in reward functions by name. The parameters of a function's constructor are its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.config.reward import Reward
from hybridflow.rewards.functions.code_tests import CodeTestsReward, check_row
from hybridflow.rewards.functions.environment import environment_return
from hybridflow.rewards.functions.exact_match import exact_match
from hybridflow.rewards.functions.format import FormatReward
from hybridflow.rewards.functions.gsm8k import gsm8k
from hybridflow.rewards.functions.math import MathReward
from hybridflow.rewards.functions.reasoning_gym import ReasoningGymReward

Function = Callable[..., object]
RowCheck = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True)
class BuiltIn:
    """The constructor of a built-in function, and its properties that must be known before a run."""

    make: Callable[..., Function]
    is_trusted: bool = True
    """It cannot hang or crash, so it needs no process of its own."""

    starts_programs: bool = False
    """It runs programs and waits for them."""

    needs_answer: bool = False
    """It compares a response with the answer in its row, and scores nothing without one."""

    row_check: RowCheck | None = None
    """Raises `RewardError` for a data row that it could not score."""


def with_run(reward: Reward, *, max_response_tokens: int) -> Reward:
    """The section with settings that a built-in function takes from the run unless the user gives them."""
    if "overlong" not in reward.functions:
        return reward
    own = {"max_response_tokens": max_response_tokens, **reward.settings.get("overlong", {})}
    return replace(reward, settings={**reward.settings, "overlong": own})


def row_checks(functions: Sequence[str]) -> list[RowCheck]:
    """The checks of data rows that the built-in ones among these functions need."""
    checks = [BUILT_IN[name].row_check for name in functions if name in BUILT_IN]
    return [check for check in checks if check is not None]


def may_be_slow(functions: Sequence[str]) -> bool:
    """Whether scoring may take long: some function is not built in, needs a process of its own, or runs programs."""
    built_in = [BUILT_IN.get(name) for name in functions]
    return any(found is None or not found.is_trusted or found.starts_programs for found in built_in)


def all_need_answers(reward: Reward) -> bool:
    """Whether the section cannot score responses to prompts without an answer."""
    built_in = [BUILT_IN.get(name) for name in reward.functions]
    return reward.model.path is None and all(found is not None and found.needs_answer for found in built_in)


def _exact_match() -> Function:
    """1 if the response equals the answer except for surrounding whitespace, else 0."""
    return exact_match


def _environment() -> Function:
    """The sum of the rewards that the environment gave in the episode (with `environment=...`)."""
    return environment_return


def _gsm8k() -> Function:
    r"""1 if the final answer (after `####`, in `\boxed{}`, or the last number) equals the data's answer, else 0."""
    return gsm8k


def _length(target: int | None = None, penalty: float = 0.0003, exact: bool = True) -> Function:
    """-penalty x distance from the target length in tokens; with `exact=false`, only tokens beyond the target count."""
    from hybridflow.rewards.functions.length import LengthReward  # imports torch

    return LengthReward(target, penalty, exact)


def _overlong(
    max_response_tokens: int | None = None, buffer_tokens: int | None = None, penalty: float = 1.0
) -> Function:
    """DAPO's soft penalty for responses close to the length limit. By default, the penalty starts in the last fifth."""
    from hybridflow.rewards.functions.length import OverlongReward  # imports torch

    return OverlongReward(max_response_tokens, buffer_tokens, penalty)


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(_exact_match, needs_answer=True),
    "environment": BuiltIn(_environment),
    "gsm8k": BuiltIn(_gsm8k, needs_answer=True),
    "math": BuiltIn(MathReward, is_trusted=False, needs_answer=True),
    "format": BuiltIn(FormatReward, is_trusted=False),
    "length": BuiltIn(_length),
    "overlong": BuiltIn(_overlong),
    "code_tests": BuiltIn(CodeTestsReward, starts_programs=True, row_check=check_row),
    "reasoning_gym": BuiltIn(ReasoningGymReward, is_trusted=False),
}
