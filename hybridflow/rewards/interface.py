"""The arguments and results of reward functions: samples, outcomes, failures."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.observability.metrics import Metrics
from hybridflow.observability.redaction import sample_lines

Message = dict[str, str]
Prompt = str | list[Message]
Completion = str | list[Message]


class RewardFunction(Protocol):
    """The native signature, which is TRL's; `dialects.py` adapts the others.

    `completions` are strings, or lists of one assistant message if prompts are conversations. Each column of the data
    is passed by its name, with one value per sample; `answer` and `data_source` always exist. None in the result means
    that this function does not score the sample.
    """

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], **columns: list
    ) -> list[float] | list[float | None]: ...


@dataclass(frozen=True)
class Samples:
    """B samples to score: prompts, completions as text, columns of the data, and token ids of the completions."""

    prompts: list[Prompt]
    completions: list[str]
    columns: Mapping[str, list] = field(default_factory=dict)
    completion_ids: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, start: int, stop: int) -> "Samples":
        """The samples from `start` up to `stop`."""
        return Samples(
            self.prompts[start:stop],
            self.completions[start:stop],
            {name: values[start:stop] for name, values in self.columns.items()},
            None if self.completion_ids is None else self.completion_ids[start:stop],
        )

    def copied(self) -> "Samples":
        """A deep copy, in which samples share no containers even if rows of the data are repeated."""
        return Samples(
            [deepcopy(prompt) for prompt in self.prompts],
            list(self.completions),
            {name: [deepcopy(value) for value in values] for name, values in self.columns.items()},
            None if self.completion_ids is None else [list(row) for row in self.completion_ids],
        )


@dataclass(frozen=True)
class Failure:
    """A sample that a function could not score, and why.

    `index` is its row in the batch, `trace` the traceback within the user's function (empty if it did not raise).
    """

    function: str
    index: int
    reason: str
    prompt: Prompt
    completion: str
    trace: str = ""

    def __str__(self) -> str:
        lines = [
            f"'{self.function}' failed on sample {self.index}: {self.reason}",
            sample_lines(_shortened(self.prompt), _shortened(self.completion)),
        ]
        return "\n".join([*lines, self.trace] if self.trace else lines)


@dataclass
class Outcome:
    """The result of one function for B samples: a finite score or None for each, and the failures.

    `metrics` and `extras` (columns of B values) are what the function itself logged.
    """

    scores: list[float | None]
    failures: list[Failure] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    extras: dict[str, list] = field(default_factory=dict)


def text_of(completion: Completion) -> str:
    """The text of a completion, which may be a conversation."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message["content"]) for message in completion)


def _shortened(text: Prompt, limit: int = 300) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[: limit - 40]} ... {shown[-35:]}"
