"""The rollout engine as episodes use it: with the settings of one purpose."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.interface import RolloutEngine


@dataclass(frozen=True)
class EpisodeSampler:
    """Submits and polls rows with one sampling setting and seed: a `ReplySampler` of `environments/play.py`."""

    engine: RolloutEngine
    sampling: Sampling
    seed: int
    may_continue: bool
    """Replies may be followed by others, so engines keep what they have read."""

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        self.engine.submit(
            rows, self.sampling, max_response_tokens=max_tokens, seed=self.seed, may_continue=self.may_continue
        )

    def poll(self) -> Batch:
        return self.engine.poll(max_tokens=1)

    def withdraw(self) -> None:
        self.engine.withdraw()
