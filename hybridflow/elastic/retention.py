"""Which checkpoints of a run are kept: the latest, those of every n-th step, and the best by a metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.loop import Trainer
from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

_LOWER_IS_BETTER = ("loss", "perplexity")


@dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep; the newest is always kept."""

    latest: int = 2
    every: int = 0
    """Keeps those of every n-th step; 0 for none."""

    best: int = 0
    metric: str | None = None
    greater_is_better: bool | None = None

    @staticmethod
    def of(trainer: Trainer) -> "Retention":
        """The retention that the settings ask for."""
        return Retention(
            trainer.keep_checkpoints,
            trainer.keep_every,
            trainer.keep_best,
            trainer.best_metric,
            trainer.greater_is_better,
        )

    def kept(self, evaluations: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, from the evaluation of each step with an intact checkpoint (empty if it had none)."""
        steps = sorted(evaluations)
        kept = set(steps[-max(self.latest, 1) :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        return kept | set(self.ranked(evaluations)[: self.best])

    def ranked(self, evaluations: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The evaluated steps, the best first; of equal ones, the later first."""
        values: dict[int, float] = {}
        for step, evaluation in evaluations.items():
            name = self.metric or _only(evaluation)
            if name is not None and math.isfinite(value := evaluation.get(name, math.nan)):
                values[step] = value if self._is_better_if_greater(name) else -value
        return sorted(values, key=lambda step: (values[step], step), reverse=True)

    def check(self, evaluation: Mapping[str, float]) -> None:
        """Raises `ConfigError` if `best` is set and an evaluation lacks the metric by which it compares."""
        if not self.best:
            return
        if self.metric is None and _only(evaluation) is None:
            raise ConfigError(
                f"trainer.keep_best={self.best} needs one metric, but the evaluation has {len(_core(evaluation))}.",
                remedy=f"Set trainer.best_metric to one of: {', '.join(_core(evaluation) or evaluation) or 'none'}.",
                key="trainer.best_metric",
            )
        if self.metric is not None and self.metric not in evaluation:
            raise ConfigError(
                f"trainer.best_metric={self.metric} is not a metric of the evaluation.",
                remedy=f"{did_you_mean(self.metric, evaluation)}Choose from: {', '.join(evaluation)}.",
                key="trainer.best_metric",
            )

    def most(self, total_steps: int, save_every: int) -> int:
        """The largest number of checkpoints that are kept at a time."""
        return max(self.latest, 1) + self.best + (total_steps // math.lcm(self.every, save_every) if self.every else 0)

    def _is_better_if_greater(self, name: str) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not name.endswith(_LOWER_IS_BETTER)


def _core(evaluation: Mapping[str, float]) -> list[str]:
    """The main metrics; `pass@N` comes with a mean."""
    return [name for name in evaluation if name.startswith("val-core/") and "/pass@" not in name]


def _only(evaluation: Mapping[str, float]) -> str | None:
    core = _core(evaluation)
    return core[0] if len(core) == 1 else None
