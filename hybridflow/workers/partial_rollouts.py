"""Rows that one replica of a rollout generates over several calls, with whatever weights it has meanwhile."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol, Required, TypedDict

import torch

from hybridflow.batch import Batch
from hybridflow.batch.episode_counts import COUNTED, ENDED, summed_counts
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.batch.versions import DECODE_STEPS
from hybridflow.config.rollout import DEFAULT_SEQUENCES
from hybridflow.controller.protocols import GENERATION, part_of
from hybridflow.controller.worker import WorkerContext
from hybridflow.workers.incoming_weights import IncomingWeights

CHECK_EVERY_TOKENS = 4
"""How often a replica that yields checks for a waiting call; the ranks of a tensor- or pipeline-parallel replica decide
together."""

IDLE_SECONDS = 1.0
"""How long a call waits for environments if there is nothing to sample: other replicas wait for it too."""

_AXES = ("pipeline", "tensor")


class TurnArguments(TypedDict, total=False):
    """The arguments of `PartialRollouts.advance` after the prompts."""

    replicas: Sequence[int]
    withdrawn: Sequence[RowName] | None
    max_tokens: Required[int | Sequence[int | None] | None]
    yields: bool


class RowStream(Protocol):
    """A rollout engine with settings for sampling, or episodes that use one; see `RolloutEngine`."""

    @property
    def num_running(self) -> int:
        """Rows that have not been returned."""
        ...

    @property
    def num_steps(self) -> int:
        """Decoding steps so far."""
        ...

    def submit(self, rows: Batch) -> None:
        """Adds rows; those of a prompt are adjacent."""
        ...

    def poll(self, *, max_tokens: int) -> Batch:
        """Takes at most `max_tokens` steps, and returns rows that have finished."""
        ...

    def withdraw(self, rows: Batch | None = None) -> Batch:
        """Ends rows early, and returns them now or by a later `poll`; without `rows`, drops all."""
        ...


class PartialRollouts:
    """Rows that stay in a rollout engine from call to call, until they have finished or are withdrawn.

    Every rank of the rollout gets the same calls; those of one replica take the same steps.

        partial = PartialRollouts(context, RowSampler(engine, sampling, seed, 128), max_sequences=256)
        finished = partial.advance(prompts, replicas=[0, 0, 1], max_tokens=[16, 16])
    """

    def __init__(self, context: WorkerContext, rows: RowStream, *, max_sequences: int | None) -> None:
        mesh = context.meshes["generation"]
        self._context = context
        self._rows = rows
        self._max_sequences = max_sequences or DEFAULT_SEQUENCES
        self._replica = part_of(GENERATION, mesh, context.rank)
        self._ranks = context.rendezvous.ranks(context.role, mesh) if mesh.count_along(_AXES) > 1 else None
        if self._ranks is not None:
            self._ranks.group(*_AXES)  # all ranks of the rollout make it together
        self.incoming: IncomingWeights | None = None
        """Weights that may arrive while rows run."""

        self._has_looked = False
        """Whether a waiting call has been seen before, without weights that arrive."""

        self._running: set[RowName] = set()

    def advance(
        self,
        prompts: Batch | None,
        *,
        replicas: Sequence[int] = (),
        withdrawn: Sequence[RowName] | None = (),
        max_tokens: int | Sequence[int | None] | None,
        yields: bool = False,
    ) -> Batch:
        """Withdraws rows, submits others, and samples tokens of all running rows; returns those that have finished.

        `replicas` has the replica of each row of `prompts`, and `max_tokens` the most decoding steps, of all replicas
        or of each (None: until no row runs). `withdrawn` are (uid, sample_index) of rows that end now, with the tokens
        that they have, or, if they are episodes, when their environments have ended; with None, all rows are dropped.
        With `yields`, it returns when its process has been sent another call. While weights are arriving it continues:
        that call would only wait for them. Without, it returns if all episodes wait for their environments for a while.

        Columns: `uid`, `sample_index` and those of `generate`; metadata: `DECODE_STEPS` and the replica, and the counts
        of episodes (`ENDED`).
        """
        before, is_divided = self._rows.num_steps, self._ranks is not None
        self._has_looked = False
        # The ranks of a divided replica compute each token together: none may leave the others.
        with nullcontext() if is_divided else self._context.interruptible():
            parts = [self._withdrawn(withdrawn)]
            self._submit(prompts, replicas)
            steps, stepped = self._rows.num_steps, time.monotonic()
            limit = max_tokens[self._replica] if isinstance(max_tokens, Sequence) else max_tokens
            while self._rows.num_running and not (yields and self._must_yield()):
                left = CHECK_EVERY_TOKENS
                if limit is not None:
                    left = min(left, limit - (self._rows.num_steps - before))
                    if left <= 0:
                        break
                if len(found := self._rows.poll(max_tokens=left)):
                    parts.append(found)
                if self._rows.num_steps > steps:
                    steps, stepped = self._rows.num_steps, time.monotonic()
                elif not yields and self._on_any_rank(time.monotonic() - stepped > IDLE_SECONDS):
                    break
        found = Batch.concat(parts)
        self._running.difference_update(row_names(found))
        taken = {f"{DECODE_STEPS}{self._replica}": self._rows.num_steps - before}
        counts = {f"{ENDED}{name}": count for name, count in summed_counts(part.meta for part in parts).items()}
        meta = {name: value for name, value in found.meta.items() if not name.startswith(COUNTED)}
        return Batch(found.by_name, meta | counts | taken, size=len(found))

    def _withdrawn(self, names: Sequence[RowName] | None) -> Batch:
        """The withdrawn rows of this replica; none if all are dropped."""
        if names is None:
            self._rows.withdraw()
            self._running.clear()
        own = torch.tensor([name for name in names or () if name in self._running], dtype=torch.int64).reshape(-1, 2)
        return self._rows.withdraw(Batch.of(rows={"uid": own[:, 0].clone(), "sample_index": own[:, 1].clone()}))

    def _submit(self, prompts: Batch | None, replicas: Sequence[int]) -> None:
        """Submits this replica's rows: together if all have a place, else each group for itself, so that none waits
        until there are places for all."""
        if prompts is None:
            return
        rows = prompts.select([row for row, replica in enumerate(replicas) if replica == self._replica])
        if not len(rows):
            return
        self._running.update(row_names(rows))
        has_places = self._rows.num_running + len(rows) <= self._max_sequences
        rows = rows.select(rows.row("uid").argsort(stable=True))
        _, sizes = rows.row("uid").unique_consecutive(return_counts=True)
        for part in [rows] if has_places else rows.split(sizes.tolist()):
            self._rows.submit(part)

    def _must_yield(self) -> bool:
        is_first = self._ranks is None or self._ranks.mesh.index_along(self._ranks.rank, _AXES) == 0
        if not self._on_any_rank(is_first and self._context.is_awaited()):
            return False
        if self.incoming is None:
            return True
        if self._on_any_rank(self.incoming.are_arriving()):
            return False
        has_looked, self._has_looked = self._has_looked, True  # the actor may be about to send weights
        return has_looked

    def _on_any_rank(self, value: bool) -> bool:
        """Whether something holds on a rank of the replica."""
        return value if self._ranks is None else bool(self._ranks.maximum(int(value), *_AXES))
