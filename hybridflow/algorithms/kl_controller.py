"""The coefficient of the KL penalty: fixed, or steered toward a target."""

from dataclasses import dataclass


@dataclass
class KLController:
    """Holds the coefficient: fixed without a target, otherwise steered so that the divergence approaches it.

    After each step: coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.
    Ziegler et al., sec. 2.2 (arXiv:1909.08593). `kl` and `target` have the same unit, nats per token or per sequence;
    `horizon` is in sequences.
    """

    coefficient: float
    target: float | None
    horizon: float

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Adjusts the coefficient to a divergence measured over `num_sequences` sequences."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        """State for a checkpoint; a fixed coefficient is a setting, so it has none."""
        return {} if self.target is None else {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned; a state of a run without a target leaves the coefficient as it is."""
        if self.target is not None:
            self.coefficient = state.get("coefficient", self.coefficient)
