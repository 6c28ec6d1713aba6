"""What every rollout engine can do."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class RolloutEngine(Protocol):
    """A model that samples, spread over the ranks of `mesh`.

    States: awake or asleep (`sleep`, `wake`); its weights are of one version at a time. Whoever writes them, through
    the slots or with `load_weights`, calls `weights_changed` before the next `generate`.

        for name, slot in engine.weight_slots().items():
            slot.tensor.copy_(trained[name])
        engine.weights_changed(version=7)
        responses = engine.generate(prompts, sampling, max_response_tokens=128, seed=0)
    """

    mesh: ParallelMesh

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """One response a row, as new columns alone (see `responses.py`), rows in the order of `prompts`.

        What a row draws depends on its prompt and on (seed, uid, sample_index) alone, not on its neighbours.
        """
        ...

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """Writable views of the engine's own weights under their canonical names; each weight exactly once."""
        ...

    def load_weights(self, shards: Iterable[WeightShard]) -> None:
        """Copies weights, or pieces of weights, into the slots; for a holder that cannot write there itself."""
        ...

    def weights_changed(self, *, version: int) -> None:
        """Forgets what was computed with earlier weights; samples carry `version` from now on."""
        ...

    def sleep(self) -> None:
        """Gives back what memory it can while others compute; `generate` must not be called."""
        ...

    def wake(self) -> None:
        """Takes that memory again."""
        ...
