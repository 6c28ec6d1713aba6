"""The rows that a step processes, and their lengths."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts as equally probable quantiles, in ascending order."""

    quantiles: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean tokens."""
        return sum(self.quantiles) / len(self.quantiles)

    @property
    def longest(self) -> float:
        """Most tokens."""
        return self.quantiles[-1]


@dataclass(frozen=True)
class Workload:
    """The rows of a step."""

    rows: int
    """Responses per step, over all devices: prompts times samples per prompt."""

    prompts: Lengths
    responses: Lengths
    optimizer_steps: int
    """Optimizer steps per update of a role: minibatches times epochs."""

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the step."""
        return self.rows * (self.prompts.mean + self.responses.mean)

    @property
    def longest_row(self) -> float:
        """The longest prompt and response together."""
        return self.prompts.longest + self.responses.longest
