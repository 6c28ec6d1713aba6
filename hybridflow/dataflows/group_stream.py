"""Groups that are generated ahead one by one, and across updates of the weights (`asynchrony.partial_rollouts`).

The loop uses a `GroupStream` as it uses `Ahead`. A step first generates until enough groups have finished (`GroupQueue`
says which ones it trains on), then learns from them. In the meantime the others continue: in a pool of its own, the
rollout continues while the step learns, until the new weights arrive; otherwise they continue in the next step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hybridflow.batch import Batch
from hybridflow.batch.row_names import RowName
from hybridflow.config.asynchrony import OnDeadline, WhenStale
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.accounts import account
from hybridflow.dataflows.ahead import PROMPTS, say_restored
from hybridflow.dataflows.discards import Discards
from hybridflow.dataflows.drawn_prompts import DrawnPrompts
from hybridflow.dataflows.group_filter import GroupFilter
from hybridflow.dataflows.group_rollout import GroupRollout
from hybridflow.dataflows.group_sampler import GroupSampler, Place, rows_at, rows_of_groups, sampler_of
from hybridflow.dataflows.groups import TURN_TOKENS, Group, GroupQueue, GroupState, collectable
from hybridflow.dataflows.ledger import Ledger, tokens_of_groups
from hybridflow.dataflows.length_ratio import LengthRatio
from hybridflow.dataflows.roles import PartialSampler
from hybridflow.dataflows.run import Loader, Run
from hybridflow.dataflows.saved_batch import SavedState, as_state, from_state
from hybridflow.dataflows.schedule import SCHEDULE_FILE, Schedule
from hybridflow.dataflows.stages import episode_metrics
from hybridflow.dataflows.stale_tokens import version_metrics, without_stale_tokens
from hybridflow.observability.metrics import Metrics, last, measured


class GroupStream:
    """The groups of a run.

    prompts = stream.begin(step, left_out)  # generates until the step's groups have finished
    metrics = stream.step()  # trains
    stream.end()  # raises if a prompt or a token was lost
    """

    def __init__(self, run: Run) -> None:
        settings = run.asynchrony
        self.depth = settings.depth
        self.is_stepping = False
        """Whether a step has begun and not ended."""

        self._run = run
        name = sampler_of(type(run.dataflow))
        sampler = cast(PartialSampler, vars(run.dataflow)[name])
        self._sampler = GroupSampler(run.dataflow, sampler, run.calls, self._go_on)
        setattr(run.dataflow, name, self._sampler)
        self._rollout = GroupRollout(sampler)
        self._filter = GroupFilter(run.dataflow)
        self._queue = self._new_queue()
        self._prompts = DrawnPrompts(self._stream)
        self._finished: set[int] = set()
        """Groups whose rows have finished, and that have not been collected."""

        self._collected: dict[int, BatchRef] = {}
        """The answers of `collect` for the groups that are done; several groups share a batch."""

        self._given_up: dict[int, str] = {}
        """Groups that have left the queue while their rows were running, and why."""

        self._truncated: set[int] = set()
        """Groups that are withdrawn, to be trained on as they are."""

        self._ledger, self._discards, self._lengths = Ledger(), Discards(settings), LengthRatio()
        self._skipped: Counter[int] = Counter()
        """Batches that were left out before each step."""

        self._balance = 0
        """Tokens that the rollout has returned and that were neither trained on nor discarded."""

        self._step = self._alone_until = 0
        """Before this step, each step generates only its own groups: one of them may have caused a fault."""

        self._chosen: Sequence[Group] = ()
        self._batch: BatchRef | None = None
        self._trained_prompts: Batch | None = None
        self._drawn: Mapping[str, int] = {}
        self._num_masked = 0
        self._is_learning = False
        self._calls = 0
        """Calls of the rollout that continue while the step learns."""

        replayed = None if settings.replay is None else Path(settings.replay)
        self._schedule = Schedule(run.checkpoints.run_dir / SCHEDULE_FILE, replayed)

    def begin(self, step: int, left_out: Sequence[int]) -> Batch:
        """Generates until the groups of a step have finished, and returns their prompts.

        For each occurrence of a step in `left_out`, the first groups in the queue, as many as a step has, are left out.
        """
        self.is_stepping, self._step = True, step
        self._run.dataflow.iteration = step
        self._leave_out(left_out)
        if self._rollout.is_called:
            self._rollout.send(None, max_tokens=0)  # ends a call that yields, even if no weights were published
        self._receive()
        turns = 0
        while (chosen := self._queue.chosen(step) if self._queue.groups else None) is None:
            is_idle = len(self._finished) == len(self._queue.of(GroupState.running)) and not self._queue.unknown
            self._send(least=self._least if is_idle else 0, max_tokens=TURN_TOKENS, stays_awake=True)
            self._receive(takes_all=is_idle and bool(self._finished))
            turns += 1
        if turns and not self._run.rollout_overlaps:
            self._rollout.send(None, max_tokens=0)  # a colocated rollout goes to sleep
            self._receive()
        self._chosen, uids = chosen, sorted(group.uid for group in chosen)
        self._batch, self._num_masked = self._rows(uids), 0
        if self._run.asynchrony.when_stale is WhenStale.mask:
            oldest = step - self._run.asynchrony.max_staleness
            self._batch, self._num_masked = without_stale_tokens(self._batch, oldest)
        self._trained_prompts = self._prompts.of(uids)
        self._run.dataflow.forget_observed()
        self._drawn = self._stream.state()
        return self._trained_prompts

    def step(self) -> Metrics:
        """Trains on the groups of the step; a rollout in a pool of its own continues meanwhile."""
        dataflow, batch = self._run.dataflow, self._batch
        assert batch is not None, "no step has begun"
        self._is_learning = self._run.rollout_overlaps and not self.is_alone
        self._calls = 0
        if self._is_learning:
            self._send(**self._until_weights())
        try:
            return measured(dataflow.learn(batch), owner=f"{type(dataflow).__name__}.learn")
        finally:
            self._is_learning = False

    def end(self) -> Metrics:
        """Metrics of staleness and of the groups; raises if a prompt or a token of the step was lost or duplicated."""
        batch, prompts = self._batch, self._trained_prompts
        assert batch is not None and prompts is not None, "no step has begun"
        self._balance -= sum(tokens_of_groups([batch]).values())
        is_all = self._drawn == self._stream.state()
        metrics = account(self._run, self._ledger, prompts, batch, step=self._step, is_all=is_all)
        metrics |= version_metrics(batch) | self._filter.end_step(trained=len(self._chosen))
        metrics |= self._discards.end_step(trained=len(self._chosen))
        metrics |= self._lengths.after(batch, rows=self._rollout.rows, tokens=self._rollout.tokens)
        metrics |= episode_metrics(self._rollout.drain_counts())
        if self._run.asynchrony.when_stale is WhenStale.mask:
            metrics["async/masked_tokens"] = last(self._num_masked)
        self._schedule.end_step(self._step, sorted(group.uid for group in self._chosen))
        self._queue.remove(self._chosen)
        for group in self._chosen:
            self._prompts.forget(group.uid)
            del self._collected[group.uid]
        self._chosen, self._batch, self._trained_prompts = (), None, None
        self.is_stepping = False
        held = sum(tokens_of_groups([self._rows([*self._collected])]).values()) if self._collected else 0
        held += sum(group.tokens for group in self._rollout.groups.values())
        assert held == self._balance, f"{self._balance} tokens were generated and not used, but {held} are held"
        return metrics | self._ledger.metrics({state.value: len(self._queue.of(state)) for state in GroupState})

    def state(self) -> SavedState:
        """Where the queue is, without tokens: its groups would be generated again."""
        skipped = {str(step): count for step, count in self._skipped.items()}
        lengths = {"trained": [*self._lengths.trained], "finished": self._rollout.forgotten()}
        draws = self._prompts.state(self._queue.groups)
        return {"draws": draws, "skipped": skipped, "totals": self._ledger.totals, "lengths": lengths}

    def saved(self) -> SavedState:
        """As `state`, with the tokens of the groups that are done; waits for none. Between two steps only."""
        assert not self.is_stepping, "the queue is saved within a step"
        self._receive(waits=False, collects=False)
        state, done = self.state(), [uid for uid, batch in self._collected.items() if batch.has_ended]
        if done:
            groups = [self._queue.groups[uid] for uid in done]
            state["done"] = {
                "uids": done,
                "versions": [group.version for group in groups],
                "known": [group.uid for group in groups if group.is_known],
                "batch": as_state(self._rows(done), self._prompts.of(done)),
            }
        if self._finished:
            found = self._finished_rows(sorted(self._finished))
            state["finished"] = {"names": list(found), "batch": as_state(rows_at([*found.values()]), Batch({}))}
        state["groups"] = [
            {"uid": group.uid, "state": group.state.value, "version": group.version}
            for group in self._queue.groups.values()
        ]
        return state

    def restore(self, state: SavedState, left_out: Sequence[int]) -> None:
        """Restores what `state` or `saved` returned; the stream has been restored."""
        self.is_stepping = False
        self._forget()
        draws = [*state.get("draws", []), *state.get("batches", [])]  # those of whole batches, if it had them
        self._add(self._prompts.restore(draws))
        self._skipped = Counter({int(step): count for step, count in state.get("skipped", {}).items()})
        self._ledger = Ledger(dict(state.get("totals", {})))
        lengths = state.get("lengths", {"trained": (0, 0), "finished": (0, 0)})
        self._lengths = LengthRatio(lengths["trained"])
        self._rollout.rows, self._rollout.tokens = lengths["finished"]
        self._schedule.resume()
        if self._step >= self._alone_until:
            self._restore_tokens(state)
        generated = len(self._queue.of(GroupState.done)) + len(self._finished)
        say_restored("groups", len(self._queue.groups), generated)

    @property
    def is_alone(self) -> bool:
        """Whether only the groups of the current step are generated, so that a fault is not another step's."""
        return not self.depth or self._step < self._alone_until

    def after_fault(self) -> None:
        """All groups must be generated again, those of each step in the step itself, until the run has passed them."""
        steps = -(-len(self._queue.groups) // max(1, self._queue.groups_per_step))
        self._alone_until = max(self._alone_until, self._step + steps, self._step + 1)

    @property
    def _stream(self) -> Loader:
        return self._run.streams[PROMPTS]

    def _new_queue(self, groups_per_step: int = 0) -> GroupQueue:
        settings = self._run.asynchrony
        steps = self._run.trainer.total_steps
        return GroupQueue(groups_per_step, settings.depth, settings.max_staleness, steps, settings.when_stale)

    def _forget(self) -> None:
        self._rollout.restart()
        self._filter.forget()
        self._queue, self._discards = self._new_queue(self._queue.groups_per_step), Discards(self._run.asynchrony)
        self._balance, self._batch, self._chosen = 0, None, ()
        for held in (self._prompts, self._collected, self._given_up):
            held.clear()
        self._finished.clear()
        self._truncated.clear()

    def _restore_tokens(self, state: SavedState) -> None:
        """Restores the groups that are done, and those that have finished and were not collected."""
        if "done" in state:
            uids = state["done"]["uids"]
            batch = from_state(state["done"]["batch"], self._prompts.of(uids), self._run.calls)
            self._take(batch, dict(zip(uids, state["done"]["versions"], strict=True)), state["done"].get("known", ()))
            self._balance += sum(tokens_of_groups([batch]).values())
        if "finished" in state:
            names = [(uid, sample) for uid, sample in state["finished"]["names"]]
            before = self._rollout.tokens
            generated = from_state(state["finished"]["batch"], Batch({}), self._run.calls)
            self._finished |= {*self._rollout.restore(names, generated)}
            self._balance += self._rollout.tokens - before
            for uid in self._finished:
                group, version = self._queue.groups[uid], self._rollout.groups[uid].oldest_version
                assert version is not None, f"group {uid} has no rows"
                group.state, group.version = GroupState.running, version

    def _leave_out(self, left_out: Sequence[int]) -> None:
        while self._skipped[self._step] < left_out.count(self._step):
            self._skipped[self._step] += 1
            self._draw_until(lambda: len(self._queue.groups) >= self._queue.groups_per_step)
            for group in [*self._queue.groups.values()][: self._queue.groups_per_step]:
                self._give_up(group, "fault")

    def _draw_until(self, is_enough: Callable[[], bool]) -> None:
        while not self._queue.groups_per_step or not is_enough():
            self._add(self._prompts.draw())

    def _add(self, uids: Iterable[int]) -> None:
        """Adds groups whose prompts have been drawn."""
        self._queue.add(uids)
        self._queue.groups_per_step = self._prompts.batch_size or self._queue.groups_per_step

    def _send(self, *, least: int = 0, **call: Any) -> None:
        """Gives up what is too old or too late, begins other groups, and lets all of them run, at least `least`."""
        settings, queue, step = self._run.asynchrony, self._queue, self._step
        for group in queue.stale(step):
            self._give_up(group, "stale")
        if settings.deadline_tokens is not None:
            for group in queue.overdue(settings.deadline_tokens):
                self._end_early(group)
        depth = 0 if self.is_alone else queue.depth
        self._draw_until(lambda: len(queue.of(GroupState.waiting)) >= queue.room(step, depth=depth, least=least))
        began = queue.admit(step, depth=depth, least=least)
        asked = self._sampler.asked(self._prompts.of([group.uid for group in began])) if began else None
        self._rollout.send(asked, **call)

    def _go_on(self) -> None:
        """After a call of `generate` within `learn`, which has ended the call that ran."""
        if self._is_learning:
            self._rollout.send(None, **self._until_weights())

    def _until_weights(self) -> dict[str, Any]:
        """The arguments of a call that continues until another one waits, or as long as the one that it repeats."""
        limits = self._schedule.limits(self._step, self._calls)
        self._calls += 1
        return {"max_tokens": limits, "yields": limits is None, "is_recorded": True}

    def _receive(self, *, waits: bool = True, collects: bool = True, takes_all: bool = False) -> None:
        """Takes the rows that have finished, and collects groups of which all have.

        `takes_all`: as no other group runs, however few are left for later.
        """
        before = self._rollout.tokens
        ended, steps, yielded = self._rollout.receive(waits=waits)
        self._schedule.yielded(yielded)
        self._balance += self._rollout.tokens - before
        taken = [sum(counts) for counts in zip(*steps, strict=True)]
        for uid, group in self._rollout.groups.items():
            if uid in self._queue.groups:
                self._queue.groups[uid].decode_steps += taken[group.replica] if taken else 0
        for uid in ended:
            if (reason := self._given_up.pop(uid, None)) is not None:
                self._discard(self._rollout.forget(uid).tokens, reason)
            elif self._rollout.groups[uid].has_empty:
                self._give_up(self._queue.groups[uid], "empty")
            else:
                self._finished.add(uid)
                self._discards.finish()
        if collects:
            self._collect(takes_all=takes_all)

    @property
    def _least(self) -> int:
        """The fewest groups that can be collected together: each rank of a role must get one."""
        return min(self._run.num_devices, self._queue.groups_per_step)

    def _collect(self, *, takes_all: bool) -> None:
        """Filters the groups that were collected before, and calls `collect` for those that have finished since."""
        for group, is_filtered in self._filter.known(self._queue, self._collected):
            group.is_known = True
            if is_filtered:
                self._give_up(group, "filtered")
        steps = self._run.trainer.total_steps - self._step
        uids = collectable(
            self._finished,
            running=len(self._queue.of(GroupState.running)) - len(self._finished),
            left=0 if takes_all else steps * self._queue.groups_per_step - len(self._collected) - len(self._finished),
            least=self._least,
        )
        if not uids:
            return
        self._finished -= {*uids}
        batch = self._sampler.answered(self._prompts.of(uids), self._finished_rows(uids))
        versions: dict[int, int] = {}
        for uid in uids:
            group = self._rollout.forget(uid)
            assert group.oldest_version is not None, f"group {uid} has no rows"
            versions[uid] = group.oldest_version
            if uid in self._truncated:
                self._truncated.remove(uid)
                self._ledger.count("groups_truncated")
        self._take(batch, versions)

    def _take(self, batch: BatchRef, versions: Mapping[int, int], known: Iterable[int] = ()) -> None:
        """Some groups have been collected, with the version of their oldest token; `known` ones are not filtered."""
        self._collected |= dict.fromkeys(versions, batch)
        known = {*(known if self._filter.is_used else versions)}
        for uid, version in versions.items():
            self._queue.finish(uid, version, is_known=uid in known)

    def _finished_rows(self, uids: Iterable[int]) -> dict[RowName, Place]:
        return {name: place for uid in uids for name, place in self._rollout.groups[uid].finished.items()}

    def _rows(self, uids: Sequence[int]) -> BatchRef:
        batches = list({id(self._collected[uid]): self._collected[uid] for uid in uids}.values())
        return rows_of_groups(batches, uids)

    def _end_early(self, group: Group) -> None:
        if group.uid in self._finished or group.uid in self._truncated:
            return
        if self._run.asynchrony.on_deadline is OnDeadline.replace:
            self._give_up(group, "deadline")
        else:
            self._truncated.add(group.uid)
            self._rollout.withdraw([group.uid])

    def _give_up(self, group: Group, reason: str) -> None:
        """Removes a group from the queue; its tokens are counted as discarded when its rows are here."""
        uid = group.uid
        self._queue.remove([group])
        self._truncated.discard(uid)
        self._prompts.forget(uid)
        if group.state is GroupState.waiting:
            self._discard(0, reason)
        elif uid in self._collected:
            self._discard(tokens_of_groups([self._collected.pop(uid)])[uid], reason)
        elif self._rollout.groups[uid].unfinished:
            self._given_up[uid] = reason
            self._rollout.withdraw([uid])
        else:
            self._finished.discard(uid)
            self._discard(self._rollout.forget(uid).tokens, reason)

    def _discard(self, tokens: int, reason: str) -> None:
        self._balance -= tokens
        self._ledger.discard(tokens, reason)
        self._discards.add(reason, groups_per_step=self._queue.groups_per_step)
