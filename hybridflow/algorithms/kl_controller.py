"""The coefficient of the KL penalty: fixed, or steered toward a target."""

from dataclasses import dataclass
from typing import Protocol


class KLController(Protocol):
    """Holds the coefficient, which `update` adjusts after each step."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Adjusts the coefficient to a divergence measured over `num_sequences` sequences."""
        ...

    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        ...

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned."""
        ...


@dataclass
class FixedKL:
    """A constant coefficient. It is a setting, so it has no state."""

    coefficient: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None:
        pass


@dataclass
class AdaptiveKL:
    """A coefficient steered so that the measured divergence approaches `target`.

    After each step: coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.
    Ziegler et al., sec. 2.2 (arXiv:1909.08593). `kl` and `target` have the same unit, nats per token or per sequence;
    `horizon` is in sequences.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"AdaptiveKL requires target and horizon above 0, not {self.target} and {self.horizon}.")

    def update(self, kl: float, *, num_sequences: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
