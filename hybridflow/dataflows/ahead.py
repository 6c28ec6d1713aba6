"""The batches of the next steps: drawn, collected ahead of their step, accounted for, saved and restored.

A version is one publication of weights, so step i (from 0) trains the weights of version i. With depth d
(`asynchrony.depth`), step i calls, in this order: `collect` for step i + d, `learn` for step i. Calls of one pool run
in call order, and `learn` publishes version i + 1, so the batch of step i + d is generated with version i. Its
staleness, d, is at most `asynchrony.max_staleness`; the first batches of a run are less stale. The order depends on
nothing else, so two runs with the same seed and settings make the same calls.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.accounts import account
from hybridflow.dataflows.interface import collected, is_in_halves
from hybridflow.dataflows.ledger import Ledger, tokens_of_groups
from hybridflow.dataflows.run import Loader, Run
from hybridflow.dataflows.saved_batch import SavedState, as_state, from_state
from hybridflow.errors import CheckpointError
from hybridflow.observability.metrics import Metrics, measured

logger = logging.getLogger(__name__)

PROMPTS = "prompts"
"""The stream that yields the batches of the steps."""


@dataclass
class Queued:
    """The batch of a later step: waiting (`batch` is None), running, or done."""

    step: int
    """The step that trains on it, from 0."""

    position: dict[str, int]
    """The state of the stream before its prompts were drawn."""

    prompts: Batch
    batch: BatchRef | None = None
    version: int = -1
    """The version of the weights when it was asked for."""

    @property
    def is_done(self) -> bool:
        """Whether all calls of `collect` have ended."""
        return self.batch is not None and self.batch.has_ended

    @property
    def state(self) -> str:
        """`waiting`, `running` or `done`."""
        return "waiting" if self.batch is None else "done" if self.is_done else "running"


class Ahead:
    """The queue of the loop. In a synchronous run, it has only the prompts of the current step.

    prompts = ahead.begin(step, left_out)  # draws, and collects ahead
    metrics = ahead.step()  # trains
    ahead.end()  # raises if a prompt or a token was lost
    """

    def __init__(self, run: Run) -> None:
        self.depth = run.asynchrony.depth
        self.is_stepping = False
        """Whether a step has begun and not ended."""

        self._run = run
        self._queue: list[Queued] = []
        self._skipped: Counter[int] = Counter()
        """Batches that were left out before the one of each step that has been drawn."""

        self._ledger = Ledger()
        self._step = self._alone_until = 0
        """Before this step, each batch is collected in its own step: one of them may have caused a fault."""

        self._drawn: Mapping[str, int] = {}
        """The state of the stream when `learn` begins."""

    @property
    def _stream(self) -> Loader:
        return self._run.streams[PROMPTS]  # an evaluation has none

    def begin(self, step: int, left_out: Sequence[int]) -> Batch:
        """The prompts of a step; those of later steps are drawn and collected too, as far as the run goes ahead.

        For each occurrence of a step in `left_out`, one batch before that of the step is left out.
        """
        self.is_stepping, self._step = True, step
        depth = self.depth if step >= self._alone_until else 0
        last = max(step, min(step + depth, self._run.trainer.total_steps - 1))
        while not self._queue or self._queue[-1].step < last:
            self._draw(self._queue[-1].step + 1 if self._queue else step, left_out)
        if self.depth:
            for queued in self._queue:
                if queued.batch is None and queued.step <= last:
                    self._collect(queued, version=step)
        self._run.dataflow.iteration = step
        self._run.dataflow.forget_observed()
        self._drawn = self._stream.state()
        assert self._queue[0].step == step, f"the queue begins with step {self._queue[0].step}, not {step}"
        return self._queue[0].prompts

    def step(self) -> Metrics:
        """Trains on the batch of the step."""
        dataflow, queued = self._run.dataflow, self._queue[0]
        owner = f"{type(dataflow).__name__}.{'learn' if is_in_halves(type(dataflow)) else 'step'}"
        if queued.batch is None:
            return measured(dataflow.step(queued.prompts), owner=owner)
        return measured(dataflow.learn(queued.batch), owner=owner)

    def end(self) -> Metrics:
        """Metrics of staleness and of the groups; raises if a prompt or a token of the step was lost or duplicated."""
        queued = self._queue[0]
        is_all = self._drawn == self._stream.state()
        metrics = account(self._run, self._ledger, queued.prompts, queued.batch, step=queued.step, is_all=is_all)
        self._queue.pop(0)
        self.is_stepping = False
        return metrics | (self._ledger.metrics(self._states()) if self.depth else {})

    def state(self) -> SavedState:
        """Where the queue is, without tokens: its batches would be collected again. Empty in a synchronous run."""
        if not self.depth and not self._queue:
            return {}
        entries = [{"step": each.step, "position": dict(each.position)} for each in self._queue]
        skipped = {str(step): count for step, count in self._skipped.items()}
        return {"batches": entries, "skipped": skipped, "totals": self._ledger.totals}

    def saved(self) -> SavedState:
        """As `state`, with the tokens of the batches that are done; waits for none. Between two steps only."""
        assert not self.is_stepping, "the queue is saved within a step"
        state = self.state()
        for entry, queued in zip(state.get("batches", []), self._queue, strict=True):
            if queued.is_done and queued.batch is not None:
                entry |= {"version": queued.version, "batch": as_state(queued.batch, queued.prompts)}
        if state:
            state["groups"] = [row for queued in self._queue for row in _groups(queued)]
        return state

    def restore(self, state: SavedState, left_out: Sequence[int]) -> None:
        """Restores what `state` or `saved` returned; the stream has been restored."""
        self.is_stepping = False
        if state.get("draws"):
            raise CheckpointError(
                "The checkpoint has single groups of the next batches (asynchrony.partial_rollouts=true).",
                remedy="Resume with asynchrony.partial_rollouts=true.",
            )
        now = self._stream.state()
        self._queue = [self._restored(entry) for entry in state.get("batches", [])]
        self._stream.restore(now)
        self._skipped = Counter({int(step): count for step, count in state.get("skipped", {}).items()})
        self._ledger = Ledger(dict(state.get("totals", {})))
        say_restored("batches", len(self._queue), sum(queued.batch is not None for queued in self._queue))
        for step in sorted({*left_out}):
            while self._skipped[step] < left_out.count(step) and self._leave_out(step):
                self._skipped[step] += 1

    @property
    def is_alone(self) -> bool:
        """Whether only the batch of the current step has been collected, so that a fault is not another's."""
        return not self.depth or self._step < self._alone_until

    def after_fault(self) -> None:
        """Discards the collected batches, which a fault may have destroyed.

        Each is collected again in its own step, so that one that causes another fault is known.
        """
        for queued in self._queue:
            queued.batch = None
            self._alone_until = max(self._alone_until, queued.step + 1)

    def _draw(self, step: int, left_out: Sequence[int]) -> None:
        for _ in range(left_out.count(step) - self._skipped[step]):
            self._stream.next()
            if self.depth:
                self._skipped[step] += 1
        position = self._stream.state()
        self._queue.append(Queued(step, position, self._stream.next()))

    def _collect(self, queued: Queued, *, version: int) -> None:
        self._run.dataflow.iteration = queued.step
        queued.batch, queued.version = collected(self._run.dataflow, queued.prompts), version

    def _restored(self, entry: SavedState) -> Queued:
        self._stream.restore(entry["position"])
        queued = Queued(entry["step"], entry["position"], self._stream.next())
        version = entry.get("version", -1)
        if "batch" in entry and queued.step - version <= self._run.asynchrony.max_staleness:
            queued.batch = from_state(entry["batch"], queued.prompts, self._run.calls)
            queued.version = version
        return queued

    def _leave_out(self, step: int) -> bool:
        """Removes the batch of a step from the queue, whose later ones move up; false if it has not been drawn."""
        if not any(queued.step == step for queued in self._queue):
            return False
        self._queue = [queued for queued in self._queue if queued.step != step]
        for queued in self._queue:
            queued.step -= queued.step > step
        return True

    def _states(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for queued in self._queue:
            found[queued.state] += len(torch.unique(queued.prompts.row("uid")))
        return found


def _groups(queued: Queued) -> list[SavedState]:
    """A row of numbers for each group: `uid`, `step`, `state`, and the versions and tokens of those that are done."""
    state, known = queued.state, dict[int, dict[str, int]]()
    if state == "done" and queued.batch is not None:
        uids, versions = queued.batch.row("uid"), queued.batch.row("weight_version")
        for uid, tokens in tokens_of_groups([queued.batch]).items():
            own = versions[uids == uid]
            known[uid] = {"first_version": int(own.min()), "last_version": int(own.max()), "tokens": tokens}
    uids = queued.prompts.row("uid").tolist()
    return [{"uid": uid, "step": queued.step, "state": state} | known.get(uid, {}) for uid in uids]


def say_restored(units: str, total: int, generated: int) -> None:
    """Logs how many batches or groups of later steps a run has restored, if any."""
    if total:
        rest = "; the others are generated again" if generated < total else ""
        logger.info("restored %s_ahead=%d generated=%d%s", units, total, generated, rest)
