"""The coefficient of the KL penalty: fixed, or steered toward a target."""

from dataclasses import dataclass
from typing import Protocol


class KLController(Protocol):
    """Holds the coefficient; is told the divergence after each step."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None: ...
    def state(self) -> dict[str, float]: ...
    def restore(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKL:
    """A coefficient that never changes."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Does nothing."""

    def state(self) -> dict[str, float]:
        """Nothing to remember: the coefficient is a setting."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Does nothing."""


@dataclass
class AdaptiveKL:
    """A coefficient steered so that the measured divergence meets `target`.

    After each step: coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.
    Ziegler et al., sec. 2.2 (arXiv:1909.08593). `kl` and `target` are in one unit, nats a token or nats a sequence;
    `horizon` is in sequences.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL needs target and horizon above 0, not {self.target} and {self.horizon}.")

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Raises the coefficient when `kl`, measured over `num_sequences`, is above the target; lowers it below."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Continues from `state()`."""
        self.coefficient = state["coefficient"]
