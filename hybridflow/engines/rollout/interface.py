"""The interface of rollout engines."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class WeightReceiver(Protocol):
    """The part of a rollout engine that receives trained weights, and lends its memory to other engines.

    States: awake or asleep (`sleep`, `wake`), with complete weights of one version or without. Weights are incomplete
    from `pause` to `resume`, and after a sleep that freed some; `generate`, `submit` and `poll` then raise, so that a
    failed transfer is never used.

        engine.pause()
        for name, slot in engine.weight_slots().items():
            slot.tensor.copy_(trained[name])
        engine.resume(version=7)
    """

    mesh: ParallelMesh

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """Writable views of this rank's shards under their canonical names, at most one per weight."""
        ...

    def pause(self, *, keep_cache: bool = False) -> None:
        """Stops between two tokens, before the slots are written; running rows keep their tokens and versions so far.

        After `resume` they continue. Their keys and values, of prompt and tokens so far, are computed again with the
        new weights, or with `keep_cache` left as the earlier weights computed them. New rows never use keys and values
        of earlier weights. Raises `EngineError` if the engine cannot keep them.
        """
        ...

    def resume(self, *, version: int) -> None:
        """Continues after `pause`, once the slots are written; labels the tokens sampled from now on with `version`."""
        ...

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """Frees memory for other engines, and returns how much; nothing can be generated until `wake`.

        This includes the slots' memory, except `kept` shards that are views of it (those of a bound training engine),
        and the keys and values of running rows, which are computed again afterwards. Freed slots can be written while
        asleep or awake, and must be written, between `pause` and `resume`, before anything is generated.
        """
        ...

    def wake(self) -> None:
        """Allocates the memory again."""
        ...


class RolloutEngine(WeightReceiver, Protocol):
    """A model that samples responses, sharded over the ranks of `mesh`, the generation mesh.

    Ranks that differ only in `tensor` or `pipeline` hold one replica together: they get the same calls in the same
    order, and return the same responses. Replicas get different rows.

    A row's samples depend only on its prompt, on (seed, uid, sample_index) and on the weights that sample each token,
    not on other rows, on when they run, on interruptions or on the number of replicas.

        engine.submit(prompts, sampling, max_response_tokens=128, seed=0)
        while engine.num_running:
            finished = engine.poll(max_tokens=16)  # meanwhile more rows may be submitted, or the weights changed
    """

    num_steps: int
    """Decoding steps so far: in each, every row that has a place gets a token."""

    @property
    def num_running(self) -> int:
        """Submitted rows that neither `poll` nor `withdraw` has returned."""
        ...

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """One response per row of `prompts`, in order; returns only the new columns (see `response_batch`).

        Submitted rows advance meanwhile; those that finish are returned by the next `poll`.
        """
        ...

    def submit(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> None:
        """Adds rows to those that are being generated, without waiting for them.

        Rows may have a column `may_continue` [B]: whether a row's prompt and response may be the beginning of a later
        row's prompt, as in conversations. An engine may then keep its keys and values.

        Raises `EngineError` for a row, identified by (uid, sample_index), that is already running, and for another
        `sampling` than that of the running rows.
        """
        ...

    def poll(self, *, max_tokens: int | None = None) -> Batch:
        """Samples one token per running row and step until a row has finished, for at most `max_tokens` steps.

        Returns the finished rows: `uid`, `sample_index` and the columns of `generate`. The batch is empty if no row has
        finished or none is running.
        """
        ...

    def withdraw(self, rows: Batch | None = None) -> Batch:
        """Removes the given rows (`uid` and `sample_index`), or all running rows; also while paused or asleep.

        Returns the columns of `poll` with the tokens so far, which may be none; rows that had not finished are
        `truncated`. Raises `EngineError` for a row that is not running.
        """
        ...
