"""A backend that starts nothing: it notes who is called with which columns, made by whom, and after what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.batch.columns import chosen
from hybridflow.config.reward import Reward
from hybridflow.controller.backends.interface import Arguments, Handle, Pending, Stored
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.packets import Packet, Portion, Summary
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.graph.stand_in import StandIn
from hybridflow.graph.trace import DRIVER
from hybridflow.rewards.scorer import RewardScorer


@dataclass(frozen=True)
class Noted:
    """One call, as it was made. `worker` is the role whose worker answers: the actor's, for a rollout beside it."""

    role: str
    worker: str
    method: str
    pool: str
    takes: Mapping[int, tuple[str, ...]]
    """Columns that travel to it, by the call that made them. A maker whose answer must be there first, though none of
    its columns travel, has none."""

    takes_all: bool
    """Whatever columns the batch has travel."""

    adds: tuple[str, ...]
    """Columns of its answer."""

    awaited: frozenset[int]
    """Calls that the driver waited for before this one."""

    rows: int
    """Rows of the first batch that travels to it; 0 without one."""

    plain: tuple[object, ...]
    """Arguments that are no batches, in order."""


class TracingBackend:
    """Calls are answered by stand-ins in this process, one rank per role, and noted in `calls`."""

    def __init__(self) -> None:
        self._local = LocalBackend()
        self._makers: dict[int, tuple[Packet, int]] = {}
        self._numbers: dict[int, tuple[Pending, int]] = {}
        self._awaited: set[int] = set()
        self.calls: list[Noted] = []

    def forget(self) -> None:
        """What was called so far was no part of a step."""
        self._makers.clear()
        self._numbers.clear()
        self._awaited.clear()
        self.calls.clear()

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """A stand-in for the worker."""
        assert pool.devices == 1, f"a step is followed on one rank a pool, and '{pool.name}' has {pool.devices}"
        reward = spec.kwargs.get("reward")
        functions = RewardScorer(reward).names if isinstance(reward, Reward) and reward.functions else []
        played = {"plays": spec.worker_class, "functions": functions}
        return self._local.spawn(replace(spec, worker_class=StandIn, kwargs=played), pool)

    def call(self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE) -> Pending:
        """Notes the call, and lets the stand-in answer."""
        pending = self._local.call(handle, method, arguments, form)
        number = len(self.calls) + 1
        for packet in pending.packets:
            assert isinstance(packet, Packet), f"a {type(packet)} among the packets"
            self._makers[id(packet)] = (packet, number)
        self._numbers[id(pending)] = (pending, number)
        given = (*arguments.args, *arguments.kwargs.values())
        portions = [value for value in given if isinstance(value, Portion)]
        self.calls.append(
            Noted(
                handle.role,
                handle.worker,
                method,
                handle.pool.name,
                takes=self._taken(portions, arguments.stored),
                takes_all=any(portion.wanted is None for portion in portions),
                adds=_added(pending.value, form),
                awaited=frozenset(self._awaited),
                rows=_num_rows(portions[0], arguments.stored) if portions else 0,
                plain=tuple(value for value in given if not isinstance(value, Portion)),
            )
        )
        return pending

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values; from now on every call comes after these."""
        self._awaited.update(self._numbers[id(call)][1] for call in pending if id(call) in self._numbers)
        return self._local.wait(pending)

    def put(self, value: object) -> Stored:
        """The value itself, which the driver made."""
        if isinstance(value, Packet):
            self._makers[id(value)] = (value, DRIVER)
        return value

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """The values; from now on every call comes after those who made them."""
        makers = {self._makers[id(value)][1] for value in stored if id(value) in self._makers}
        self._awaited.update(makers - {DRIVER})
        return list(stored)

    def mark(self) -> None:
        """Nothing is abandoned here."""

    def is_changing(self) -> bool:
        """Nothing changes."""
        return False

    def abandon(self, seconds: float) -> bool:
        """Nothing is under way."""
        return True

    def drain_calls(self) -> list[tuple[str, str, float]]:
        """Nothing took any time."""
        return []

    def kill(self, handles: Sequence[Handle]) -> None:
        """Forgets these stand-ins."""
        self._local.kill(handles)

    def shutdown(self) -> None:
        """Forgets all stand-ins."""
        self._local.shutdown()

    def _taken(self, portions: Sequence[Portion], stored: Sequence[Stored]) -> dict[int, tuple[str, ...]]:
        """Columns by the call that made them."""
        found: dict[int, dict[str, None]] = {}
        for portion in portions:
            for slot in (slot for table in portion.tables for shard in table.shards for slot in shard.slots):
                packet = stored[slot]
                assert isinstance(packet, Packet), f"slot {slot} holds {type(packet)}"
                _, maker = self._makers.get(id(packet), (packet, DRIVER))
                names = [name for name in packet.columns if portion.wanted is None or name in portion.wanted]
                found.setdefault(maker, {}).update(dict.fromkeys(names))
        return {maker: tuple(names) for maker, names in sorted(found.items())}


def _num_rows(portion: Portion, stored: Sequence[Stored]) -> int:
    """Rows of a portion: those that it takes of each shard."""
    count = 0
    for shard in portion.tables[0].shards:
        packet = stored[shard.slots[0]]
        assert isinstance(packet, Packet), f"slot {shard.slots[0]} holds {type(packet)}"
        column = chosen(next(iter(packet.columns.values())), shard.rows)
        count += len(column)
    return count


def _added(answer: object, form: AnswerForm) -> tuple[str, ...]:
    """Columns of an answer: those promised, and then the others."""
    found = answer.columns if isinstance(answer, Summary) else ()
    return tuple(dict.fromkeys([*(name for name in form.provides if name in found), *found]))
