"""Which groups (a prompt and its samples) begin, are trained on, or are given up: numbers only, no tokens.

Step i, counted from 0, trains the weights of version i. A group admitted in step v begins with version v, so at step i
its oldest token is at most i - v versions old. With B groups per step and depth d, at most (d + 1) B groups are in
flight: admitted, and not trained on yet. A few more begin if too few groups would otherwise be left to collect.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hybridflow.config.asynchrony import WhenStale

TURN_TOKENS = 16
"""Decoding steps between two looks at which groups have finished, while a step waits for them."""


class GroupState(Enum):
    """`waiting` (not begun), `running`, or `done` (its samples have finished)."""

    waiting = "waiting"
    running = "running"
    done = "done"


@dataclass
class Group:
    """A prompt and its samples."""

    uid: int
    """Its position in the stream of prompts."""

    state: GroupState = GroupState.waiting
    version: int = 0
    """The version of its oldest token: of the weights with which it began, until its samples are known."""

    decode_steps: int = 0
    """The decoding steps that its replica has taken since it began."""

    is_known: bool = True
    """Once it is done: whether it is known that a step may train on it."""


@dataclass
class GroupQueue:
    """The groups that are waiting, running or done, in the order of the stream.

    queue.add(uids)
    began = queue.admit(step)  # as many as there is room for
    queue.finish(uid, oldest_version)
    chosen = queue.chosen(step)  # None: the step has to wait for groups that run
    queue.remove(chosen)
    """

    groups_per_step: int
    depth: int
    max_staleness: int
    total_steps: int
    when_stale: WhenStale = WhenStale.wait
    """`wait`: a step waits, so that no group becomes too old (unless more than (d + 1) B are in flight). `drop`: it
    does not wait, and `stale` ones must be given up. `mask`: their age does not matter."""

    groups: dict[int, Group] = field(default_factory=dict)

    def add(self, uids: Iterable[int]) -> None:
        """Adds waiting groups at the end of the queue."""
        self.groups |= {uid: Group(uid) for uid in uids}

    def remove(self, groups: Iterable[Group]) -> None:
        """Removes groups that were trained on or discarded."""
        for group in groups:
            del self.groups[group.uid]

    def of(self, *states: GroupState) -> list[Group]:
        """The groups in some states, in the order of the stream."""
        return [group for group in self.groups.values() if group.state in states]

    def room(self, step: int, *, depth: int | None = None, least: int = 0) -> int:
        """Number of groups that may begin at a step: as many as have room, and at least enough that `least` groups run.

        `depth` replaces that of the queue.
        """
        steps = min((self.depth if depth is None else depth) + 1, self.total_steps - step)
        running = len(self.of(GroupState.running))
        free = steps * self.groups_per_step - running - len(self.of(GroupState.done))
        return max(0, free, least - running)

    @property
    def unknown(self) -> list[Group]:
        """The groups that are done, and of which it is not known whether a step may train on them."""
        return [group for group in self.of(GroupState.done) if not group.is_known]

    def admit(self, step: int, *, depth: int | None = None, least: int = 0) -> list[Group]:
        """The waiting groups that begin now, oldest first."""
        began = self.of(GroupState.waiting)[: self.room(step, depth=depth, least=least)]
        for group in began:
            group.state, group.version, group.decode_steps = GroupState.running, step, 0
        return began

    def finish(self, uid: int, oldest_version: int, *, is_known: bool = True) -> None:
        """Marks a group as done; `oldest_version` is that of its oldest token."""
        group = self.groups[uid]
        group.state, group.version, group.is_known = GroupState.done, oldest_version, is_known

    def chosen(self, step: int) -> list[Group] | None:
        """The groups that a step trains on, oldest first; None if it has to wait for running ones.

        A step waits for as many old groups as the following steps could not take before they are too old: of those that
        are due at step + k, all but k B.
        """
        done, oldest = [group for group in self.of(GroupState.done) if group.is_known], step - self.max_staleness
        if self.when_stale is not WhenStale.mask:
            done = [group for group in done if group.version >= oldest]
        if len(done) < self.groups_per_step:
            return None
        for later in range(self.max_staleness if self.when_stale is WhenStale.wait else 0):
            due = [group for group in self.of(GroupState.running, GroupState.done) if group.version <= oldest + later]
            ready = sum(group.state is GroupState.done and group.is_known for group in due)
            if ready < len(due) - later * self.groups_per_step:
                return None
        return sorted(done, key=lambda group: (group.version, group.uid))[: self.groups_per_step]

    def stale(self, step: int) -> list[Group]:
        """The groups that are too old for a step, and will be for every later one; none with `mask`."""
        if self.when_stale is WhenStale.mask:
            return []
        oldest = step - self.max_staleness
        return [group for group in self.of(GroupState.running, GroupState.done) if group.version < oldest]

    def overdue(self, decode_steps: int) -> list[Group]:
        """The groups that have been running for so many decoding steps."""
        return [group for group in self.of(GroupState.running) if group.decode_steps >= decode_steps]


def collectable(finished: Iterable[int], *, running: int, left: int, least: int) -> list[int]:
    """Those of the finished groups that can be collected now, the oldest ones; each rank of a role must get one.

    If any, they are at least `least`, and so are all that can be collected after them, unless these were the last:
    `left` counts the groups that the run still needs in addition to the finished ones, of which `running` have begun.
    While few are running, the newest finished ones therefore wait for them.
    """
    wait = max(0, least - running) if running else 0
    uids = sorted(finished)
    taken = uids[: max(0, len(uids) - wait)]
    return [] if len(taken) < least or 0 < left < least - wait else taken


def least_loaded(loads: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The replica of each new group of some rows, one after another: the one with the fewest rows, or the first."""
    loads, chosen = list(loads), []
    for size in sizes:
        replica = min(range(len(loads)), key=lambda index: (loads[index], index))
        loads[replica] += size
        chosen.append(replica)
    return chosen
