"""format: whether the response matches a pattern."""

import re

from hybridflow.errors import ConfigError
from hybridflow.rewards.interface import Completion, Prompt, text_of


class FormatReward:
    """1 if the whole response matches the regular expression `pattern` (dots also match line breaks), else 0."""

    def __init__(self, pattern: str | None = None) -> None:
        if pattern is None:
            raise ConfigError(
                "The reward function 'format' needs a pattern.",
                remedy=r"Set reward.settings.format.pattern, for example '<think>.*</think>\s*<answer>.*</answer>'.",
            )
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"reward.settings.format.pattern={pattern} is not a regular expression: {error}.",
                remedy="Correct it; a literal bracket, dot or star needs a backslash.",
            ) from error

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: list) -> list[float]:
        """One score per completion."""
        return [float(self._pattern.fullmatch(text_of(completion)) is not None) for completion in completions]
