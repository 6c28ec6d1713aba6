"""length and overlong: penalties on the number of tokens of a response."""

import torch

from hybridflow.algorithms.response_length import length_penalty, overlong_punishment
from hybridflow.errors import ConfigError
from hybridflow.rewards.interface import Completion, Prompt


class LengthReward:
    """-penalty per token beyond `target`; if `exact`, also per token short of it."""

    def __init__(self, target: int | None, penalty: float, exact: bool) -> None:
        if target is None:
            raise ConfigError(
                "The reward function 'length' needs a target.", remedy="Set reward.settings.length.target=128 (tokens)."
            )
        if target < 0:
            raise ConfigError(f"reward.settings.length.target={target} is below 0.", remedy="Use a number of tokens.")
        self._numbers = {"target": target, "penalty": penalty, "exact": exact}

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], completion_ids: list[list[int]], **columns: list
    ) -> list[float]:
        """One score per completion."""
        return length_penalty(_lengths(completion_ids), **self._numbers).tolist()


class OverlongReward:
    """DAPO's soft punishment, times `penalty`, of responses of nearly `max_response_tokens`."""

    def __init__(self, max_response_tokens: int | None, buffer_tokens: int | None, penalty: float) -> None:
        if max_response_tokens is None:
            raise ConfigError(
                "The reward function 'overlong' does not know the longest response.",
                remedy="Set reward.settings.overlong.max_response_tokens; a run takes data.max_response_tokens.",
            )
        buffer = max(1, max_response_tokens // 5) if buffer_tokens is None else buffer_tokens
        if not 0 < buffer <= max_response_tokens:
            raise ConfigError(
                f"reward.settings.overlong.buffer_tokens={buffer} must be between 1 and {max_response_tokens}, the"
                " longest response.",
                remedy=f"Use 1 to {max_response_tokens}; DAPO uses a fifth of the longest response.",
            )
        self._penalty = penalty
        self._numbers = {"max_tokens": max_response_tokens, "buffer_tokens": buffer}

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], completion_ids: list[list[int]], **columns: list
    ) -> list[float]:
        """One score per completion."""
        return (self._penalty * overlong_punishment(_lengths(completion_ids), **self._numbers)).tolist()


def _lengths(completion_ids: list[list[int]]) -> torch.Tensor:
    return torch.tensor([len(ids) for ids in completion_ids], dtype=torch.float32)
