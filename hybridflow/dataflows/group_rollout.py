"""The rows of groups in the rollout: which begin, which run, and which have finished."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridflow.batch.episode_counts import ENDED
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.batch.versions import DECODE_STEPS
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.group_sampler import Place
from hybridflow.dataflows.groups import least_loaded
from hybridflow.dataflows.roles import PartialSampler


@dataclass
class RunningGroup:
    """The rows of a group that has begun."""

    replica: int
    unfinished: set[RowName]
    finished: dict[RowName, Place] = field(default_factory=dict)
    tokens: int = 0
    """Response tokens of the finished rows."""

    has_empty: bool = False
    """Whether a finished row has no token."""

    oldest_version: int | None = None
    """The oldest version of weights that sampled the finished rows."""


class GroupRollout:
    """Calls `advance` of the rollout, and keeps the rows that it returns.

    All rows of a group run on the same replica, which reads their prompt once.

        rollout.send(rows, max_tokens=16)
        for uid in rollout.receive():  # whose rows have all finished
            rollout.groups[uid].finished
    """

    def __init__(self, sampler: PartialSampler) -> None:
        self.groups: dict[int, RunningGroup] = {}
        self.tokens = 0
        """Response tokens of all rows that have been returned."""

        self.rows = 0
        """Their number."""

        self._sampler = sampler
        self._num_replicas = 0
        self._sent: list[tuple[BatchRef, bool]] = []
        self._withdrawn: list[RowName] = []
        self._must_drop = True
        self._counts: dict[str, list[tuple[float, int]]] = {}

    @property
    def is_called(self) -> bool:
        """Whether answers have not been received."""
        return bool(self._sent)

    def send(
        self,
        rows: BatchRef | None,
        *,
        max_tokens: int | Sequence[int | None] | None,
        yields: bool = False,
        stays_awake: bool = False,
        is_recorded: bool = False,
    ) -> None:
        """Calls `advance`, for rows that run and those that begin, without waiting.

        `is_recorded`: `receive` also returns its decoding steps separately.
        """
        if self._must_drop:
            self._must_drop = False
            dropped = self._sampler.advance(None, withdrawn=None, max_tokens=0, stays_awake=True)
            self._num_replicas = len(_steps_of(dropped))
        withdrawn, self._withdrawn = self._withdrawn, []
        answer = self._sampler.advance(
            rows,
            replicas=[] if rows is None else self._begin(rows),
            withdrawn=withdrawn,
            max_tokens=max_tokens,
            yields=yields,
            stays_awake=stays_awake,
        )
        self._sent.append((answer, is_recorded))

    def receive(self, *, waits: bool = True) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """Waits for the answers to all calls, or takes those that have ended.

        Returns the groups whose rows have all finished since the last call, the decoding steps of each replica for each
        answer, and those of the calls that are recorded.
        """
        ended: list[int] = []
        steps: list[list[int]] = []
        recorded: list[list[int]] = []
        while self._sent and (waits or self._sent[0][0].has_ended):
            answer, is_recorded = self._sent.pop(0)
            steps.append(_steps_of(answer))
            recorded += steps[-1:] if is_recorded else []
            ended += self._returned(answer)
        return ended, steps, recorded

    def withdraw(self, uids: Iterable[int]) -> None:
        """The next call returns these groups with the tokens that they have."""
        self._withdrawn += [name for uid in uids for name in sorted(self.groups[uid].unfinished)]

    def forget(self, uid: int) -> RunningGroup:
        """Removes a group whose rows have finished."""
        assert not self.groups[uid].unfinished, f"group {uid} has rows that run"
        return self.groups.pop(uid)

    def restore(self, names: Sequence[RowName], generated: BatchRef) -> list[int]:
        """Takes rows that finished before a checkpoint was saved; returns their groups, of which all rows have."""
        for name in names:
            self.groups.setdefault(name[0], RunningGroup(0, set())).unfinished.add(name)
        return self._note(names, generated)

    def drain_counts(self) -> dict[str, list[tuple[float, int]]]:
        """Counts of the episodes that were returned since the last call (`episode_metrics`)."""
        counts, self._counts = self._counts, {}
        return counts

    def forgotten(self) -> tuple[int, int]:
        """The number of rows of the groups that were forgotten, and of their response tokens."""
        held = self.groups.values()
        return self.rows - sum(len(group.finished) for group in held), self.tokens - sum(g.tokens for g in held)

    def restart(self) -> None:
        """Nothing runs any more; what the rollout still has is dropped at the next call."""
        self.groups.clear()
        self._sent.clear()
        self._withdrawn.clear()
        self._must_drop = True

    def _begin(self, rows: BatchRef) -> list[int]:
        """Chooses a replica for each group; returns that of each row."""
        names: dict[int, set[RowName]] = {}
        for name in row_names(rows):
            names.setdefault(name[0], set()).add(name)
        loads = [0] * self._num_replicas
        for group in self.groups.values():
            loads[group.replica] += len(group.unfinished)
        chosen = dict(zip(names, least_loaded(loads, [len(own) for own in names.values()]), strict=True))
        self.groups |= {uid: RunningGroup(chosen[uid], own) for uid, own in names.items()}
        return [chosen[uid] for uid, _ in row_names(rows)]

    def _returned(self, answer: BatchRef) -> list[int]:
        for name, parts in answer.metrics_by_shard(ENDED).items():
            self._counts.setdefault(name.removeprefix(ENDED), []).extend(parts)
        meta = {key: value for key, value in answer.meta.items() if not key.startswith((DECODE_STEPS, ENDED))}
        return self._note(row_names(answer), answer.without(["uid", "sample_index"]).with_meta(**meta))

    def _note(self, names: Sequence[RowName], generated: BatchRef) -> list[int]:
        """Rows with these names have finished; returns the groups of which all have."""
        ended = []
        lengths, versions = generated.tokens_of("response_ids").tolist(), generated.row("weight_version").tolist()
        for position, (name, tokens, version) in enumerate(zip(names, lengths, versions, strict=True)):
            group = self.groups[name[0]]
            group.unfinished.remove(name)
            group.finished[name] = (generated, position)
            group.tokens += tokens
            self.tokens += tokens
            self.rows += 1
            group.has_empty |= not tokens
            group.oldest_version = version if group.oldest_version is None else min(version, group.oldest_version)
            if not group.unfinished:
                ended.append(name[0])
        return ended


def _steps_of(answer: BatchRef) -> list[int]:
    """The decoding steps of each replica."""
    found = {name: int(steps) for name, [(steps, _)] in answer.metrics_by_shard(DECODE_STEPS).items()}
    return [found[f"{DECODE_STEPS}{replica}"] for replica in range(len(found))]
