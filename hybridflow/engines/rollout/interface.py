"""What every rollout engine can do."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class RolloutEngine(Protocol):
    """A model that samples, spread over the ranks of `mesh`, the generation mesh.

    Ranks that differ in `tensor` or `pipeline` alone hold one replica together: they are given the same rows in the
    same order and return the same. Replicas are given different rows.

    States: awake or asleep (`sleep`, `wake`); its weights are whole, of one version, or not (from `weights_changing` to
    `weights_changed`, and after a sleep that gave some back), and then `generate` refuses. So a transfer that failed
    half way never answers.

        engine.weights_changing()
        for name, slot in engine.weight_slots().items():
            slot.tensor.copy_(trained[name])
        engine.weights_changed(version=7)
        responses = engine.generate(prompts, sampling, max_response_tokens=128, seed=0)
    """

    mesh: ParallelMesh

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """One response per row, as new columns alone (see `responses.py`), rows in the order of `prompts`.

        What a row draws depends on its prompt and on (seed, uid, sample_index) alone, not on its neighbours, nor on
        the number of replicas.
        """
        ...

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """Writable views of the pieces that this rank holds, under their canonical names; each weight at most once."""
        ...

    def weights_changing(self) -> None:
        """The slots are about to be written: `generate` refuses until `weights_changed`."""
        ...

    def weights_changed(self, *, version: int) -> None:
        """The slots are written: forgets what earlier weights computed; samples carry `version` from now on."""
        ...

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """Gives back what memory it can while others compute, and says how much; `generate` must not be called.

        The slots' memory is given back too, but for those of `kept` that are views of it (a training engine's own
        shards, where it is bound). Slots that were given back may be written, asleep or awake, and must be before the
        next `generate`.
        """
        ...

    def wake(self) -> None:
        """Takes that memory again."""
        ...
