"""The coefficient of the KL penalty: fixed, or steered toward a target."""

from dataclasses import dataclass
from typing import Protocol


class KLController(Protocol):
    """Holds the coefficient; `update` receives the divergence after each step."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Adjusts the coefficient to a divergence measured over `num_sequences` sequences."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        ...

    def restore(self, state: dict[str, float]) -> None:
        """Continues from `state()`."""
        ...


@dataclass
class FixedKL:
    """A coefficient that never changes. It is a setting, so there is nothing to keep."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None:
        pass


@dataclass
class AdaptiveKL:
    """A coefficient steered so that the measured divergence meets `target`.

    After each step: coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.
    Ziegler et al., sec. 2.2 (arXiv:1909.08593). `kl` and `target` are in one unit, nats per token or nats per sequence;
    `horizon` is in sequences.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL needs target and horizon above 0, not {self.target} and {self.horizon}.")

    def update(self, kl: float, *, num_sequences: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
