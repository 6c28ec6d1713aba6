"""A rollout engine with the settings of one purpose."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.interface import RolloutEngine


@dataclass(frozen=True)
class RowSampler:
    """Submits and polls rows with one sampling setting and seed."""

    engine: RolloutEngine
    sampling: Sampling
    seed: int
    max_response_tokens: int

    @property
    def num_running(self) -> int:
        """Rows that have not been returned."""
        return self.engine.num_running

    @property
    def num_steps(self) -> int:
        """Decoding steps so far."""
        return self.engine.num_steps

    def submit(self, rows: Batch, *, max_tokens: int | None = None) -> None:
        """See `RolloutEngine.submit`; `max_tokens` if responses are shorter than `max_response_tokens`."""
        limit = self.max_response_tokens if max_tokens is None else max_tokens
        self.engine.submit(rows, self.sampling, max_response_tokens=limit, seed=self.seed)

    def poll(self, *, max_tokens: int = 1) -> Batch:
        """See `RolloutEngine.poll`."""
        return self.engine.poll(max_tokens=max_tokens)

    def withdraw(self, rows: Batch | None = None) -> Batch:
        """See `RolloutEngine.withdraw`."""
        return self.engine.withdraw(rows)
