"""A backend that starts nothing: it records which role is called, with which columns, and which call made them."""

from collections.abc import Sequence
from dataclasses import replace

from hybridflow.batch.columns import chosen
from hybridflow.config.reward import Reward
from hybridflow.controller.backends.interface import Arguments, Handle, Pending, Stored
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.located import pieces
from hybridflow.controller.packets import Packet, Portion, Summary
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.graph.stand_in import StandIn
from hybridflow.graph.trace import DRIVER, Call
from hybridflow.rewards.scorer import RewardScorer


class TracingBackend(LocalBackend):
    """Calls are answered by stand-ins in this process, one rank per role, and recorded in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[int, tuple[Packet, int]] = {}
        self._last = self._forgotten = 0
        self._awaited: set[int] = set()
        self.calls: list[Call] = []
        self.is_ahead = False
        """Whether the calls from now on are those of `collect`."""

    def forget(self) -> None:
        """Drops the calls so far, which are not part of a step."""
        self._makers.clear()
        self._forgotten = self._last
        self._awaited.clear()
        self.calls.clear()

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Starts a stand-in for the worker."""
        assert pool.devices == 1, f"a step is traced on one rank per pool, and '{pool.name}' has {pool.devices}"
        reward = spec.kwargs.get("reward")
        functions = RewardScorer(reward).names if isinstance(reward, Reward) and reward.functions else []
        played = {"plays": spec.worker_class, "functions": functions}
        return super().spawn(replace(spec, worker_class=StandIn, kwargs=played), pool)

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Records the call, and lets the stand-in answer."""
        pending = super().call(handle, method, arguments, form, number)
        self._last = number
        if pending.packet is not None:
            assert isinstance(pending.packet, Packet), f"not a packet: {type(pending.packet)}"
            self._makers[id(pending.packet)] = (pending.packet, number - self._forgotten)
        given = (*arguments.args, *arguments.kwargs.values())
        portions = [value for value in given if isinstance(value, Portion)]
        self.calls.append(
            Call(
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
                is_ahead=self.is_ahead,
            )
        )
        return pending

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values; from now on every call comes after these."""
        numbers = (call.number - self._forgotten for call in pending)
        self._awaited.update(number for number in numbers if number > 0)
        return super().wait(pending)

    def put(self, value: object) -> Stored:
        """The value itself, which the driver made."""
        if isinstance(value, Packet):
            self._makers[id(value)] = (value, DRIVER)
        return value

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """The values; from now on every call comes after the calls that made them."""
        makers = {self._makers[id(value)][1] for value in stored if id(value) in self._makers}
        self._awaited.update(makers - {DRIVER})
        return list(stored)

    def _taken(self, portions: Sequence[Portion], stored: Sequence[Stored]) -> dict[int, tuple[str, ...]]:
        """Columns by the call that made them."""
        found: dict[int, dict[str, None]] = {}
        for portion in portions:
            for runs, _, hidden, _ in portion.tables:
                for slot in (slot for slots, _ in pieces(runs) for slot in slots):
                    packet = stored[slot]
                    assert isinstance(packet, Packet), f"slot {slot} holds {type(packet)}"
                    _, maker = self._makers.get(id(packet), (packet, DRIVER))
                    names = [n for n in packet.columns if portion.wanted is None or n in portion.wanted]
                    found.setdefault(maker, {}).update(dict.fromkeys(n for n in names if n not in hidden))
        return {maker: tuple(names) for maker, names in sorted(found.items())}


def _num_rows(portion: Portion, stored: Sequence[Stored]) -> int:
    """Rows of a portion: those that it takes of each shard."""
    count = 0
    for slots, rows in pieces(next((runs for runs, *_ in portion.tables if runs), b"")):
        packet = stored[slots[0]]
        assert isinstance(packet, Packet), f"slot {slots[0]} holds {type(packet)}"
        count += len(chosen(next(iter(packet.columns.values())), rows))
    return count


def _added(answer: object, form: AnswerForm) -> tuple[str, ...]:
    """Columns of an answer: those promised, and then the others."""
    found = Summary(*answer).columns if form.provides and isinstance(answer, list) else ()
    return tuple(dict.fromkeys([*(name for name in form.provides if name in found), *found]))
