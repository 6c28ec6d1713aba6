"""The interface of rollout engines."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class RolloutEngine(Protocol):
    """A model that samples responses, sharded over the ranks of `mesh`, the generation mesh.

    Ranks that differ only in `tensor` or `pipeline` hold one replica together: they get the same rows in the same
    order, and return the same responses. Replicas get different rows.

    States: awake or asleep (`sleep`, `wake`), with complete weights of one version or without. Weights are incomplete
    from `weights_changing` to `weights_changed`, and after a sleep that freed some; `generate` then raises, so that a
    failed transfer is never used.

        engine.weights_changing()
        for name, slot in engine.weight_slots().items():
            slot.tensor.copy_(trained[name])
        engine.weights_changed(version=7)
        responses = engine.generate(prompts, sampling, max_response_tokens=128, seed=0)
    """

    mesh: ParallelMesh

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """One response per row of `prompts`, in order; returns only the new columns (see `response_batch`).

        A row's samples depend only on its prompt and on (seed, uid, sample_index), not on other rows or the number of
        replicas.
        """
        ...

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """Writable views of this rank's shards under their canonical names, at most one per weight."""
        ...

    def weights_changing(self) -> None:
        """Announces that the slots will be written: `generate` raises until `weights_changed`."""
        ...

    def weights_changed(self, *, version: int) -> None:
        """Announces that the slots are written: drops caches of earlier weights, and labels samples with `version`."""
        ...

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """Frees memory for other engines, and returns how much; `generate` must not be called until `wake`.

        This includes the slots' memory, except `kept` shards that are views of it (those of a bound training engine).
        Freed slots can be written while asleep or awake, and must be written before the next `generate`.
        """
        ...

    def wake(self) -> None:
        """Allocates the memory again."""
        ...
