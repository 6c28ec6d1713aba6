"""Names of built-in reward functions -> what makes them. The parameters of a maker are the function's settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError

Function = Callable[..., object]
RowCheck = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True)
class BuiltIn:
    """What makes a function, and whether it may take long or much, so that it had better have its own process."""

    make: Callable[..., Function]
    is_trusted: bool = True
    needs_answer: bool = False
    """It compares a response with the row's answer, and can do nothing without one."""

    row_check: Callable[[], RowCheck] | None = None
    """What makes a check of data rows, by their columns: it raises `RewardError` for one that cannot be judged."""


def with_run(reward: Reward, *, max_response_tokens: int) -> Reward:
    """The section with what built-in functions must know of the run, where the user says nothing else."""
    if "overlong" not in reward.functions:
        return reward
    own = {"max_response_tokens": max_response_tokens, **reward.settings.get("overlong", {})}
    return replace(reward, settings={**reward.settings, "overlong": own})


def row_checks(functions: Sequence[str]) -> list[RowCheck]:
    """The checks of data rows that built-in functions among these bring."""
    makers = [BUILT_IN[name].row_check for name in functions if name in BUILT_IN]
    return [make() for make in makers if make is not None]


def _exact_match() -> Function:
    """1 where the response is the answer, word for word, else 0."""
    from hybridflow.rewards.functions.exact_match import exact_match

    return exact_match


def _gsm8k() -> Function:
    r"""1 where the final answer (after `####`, in `\boxed{}`, or the last number) is the data's, else 0."""
    from hybridflow.rewards.functions.gsm8k import gsm8k

    return gsm8k


def _math(answer_seconds: int = 5) -> Function:
    """1 where the final answer equals the data's as mathematics, else 0 (extra `math`)."""
    from hybridflow.rewards.functions.math import MathReward

    return MathReward(answer_seconds)


def _format(pattern: str | None = None) -> Function:
    """1 where the whole response matches a regular expression, else 0."""
    from hybridflow.rewards.functions.format import FormatReward

    return FormatReward(pattern)


def _length(target: int | None = None, penalty: float = 0.0003, exact: bool = True) -> Function:
    """-penalty for each token away from the target; `exact=false`: for each token beyond it."""
    from hybridflow.rewards.functions.length import LengthReward

    if target is None:
        raise ConfigError(
            "The reward function 'length' needs a target.", remedy="Set reward.settings.length.target=128 (tokens)."
        )
    return LengthReward(target, penalty, exact)


def _overlong(
    max_response_tokens: int | None = None, buffer_tokens: int | None = None, penalty: float = 1.0
) -> Function:
    """DAPO's soft punishment: from 0 to -penalty over the last `buffer_tokens` of the longest response."""
    from hybridflow.rewards.functions.length import OverlongReward

    if max_response_tokens is None:
        raise ConfigError(
            "The reward function 'overlong' does not know the longest response.",
            remedy="Set reward.settings.overlong.max_response_tokens; a run takes data.max_response_tokens.",
        )
    return OverlongReward(max_response_tokens, buffer_tokens, penalty)


def _reasoning_gym() -> Function:
    """The score of the task's own scorer, for data named `reasoning_gym:<task>` (extra `reasoning-gym`)."""
    from hybridflow.rewards.functions.reasoning_gym import ReasoningGymReward

    return ReasoningGymReward()


def _code_tests(
    cpu_seconds: int = 5,
    wall_seconds: float = 10.0,
    memory_mb: int = 512,
    scratch_mb: int = 16,
    max_tests: int | None = None,
    partial: bool = False,
    workers: int | None = None,
    unconfined: bool = False,
) -> Function:
    """1 where the response's program passes the row's tests, else 0; `partial`: the fraction passed."""
    from hybridflow.rewards.functions.code_tests import CodeTestsReward
    from hybridflow.rewards.sandbox.limits import Limits

    limits = Limits(cpu_seconds, wall_seconds, memory_mb, scratch_mb)
    return CodeTestsReward(limits, max_tests=max_tests, partial=partial, workers=workers, unconfined=unconfined)


def _code_tests_row_check() -> RowCheck:
    from hybridflow.rewards.functions.code_tests import check_row

    return check_row


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(_exact_match, needs_answer=True),
    "gsm8k": BuiltIn(_gsm8k, needs_answer=True),
    "math": BuiltIn(_math, is_trusted=False, needs_answer=True),
    "format": BuiltIn(_format, is_trusted=False),
    "length": BuiltIn(_length),
    "overlong": BuiltIn(_overlong),
    "code_tests": BuiltIn(_code_tests, row_check=_code_tests_row_check),
    "reasoning_gym": BuiltIn(_reasoning_gym, is_trusted=False),
}


def all_need_answers(reward: Reward) -> bool:
    """Whether nothing in the section can score a response to a prompt without an answer."""
    built_in = [BUILT_IN.get(name) for name in reward.functions]
    return reward.model.path is None and all(found is not None and found.needs_answer for found in built_in)
