"""Spare processes: they have imported what workers import, hold no model, and take the places of lost processes.

Without them, a lost process is replaced by one that must start and import torch, transformers and the engines, which
takes most of the time of a recovery.
"""

import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from hybridflow.controller.backends.ray.cluster import on_node
from hybridflow.controller.backends.ray.host import Host, Place, SpareHost, end_process
from hybridflow.controller.backends.ray.loaded import Loaded
from hybridflow.controller.backends.ray.placement import PlacedPool
from hybridflow.controller.backends.ray.pulse import BEAT_SECONDS, Pulse
from hybridflow.controller.failures import HostInfo
from hybridflow.controller.resource_pool import ResourcePool

logger = logging.getLogger(__name__)

_FIRST_SECONDS = 5.0
"""How long after its first step a run starts spare processes; a run that ends earlier starts none."""

_LOOK_SECONDS = 2.0
"""How often the spare processes are checked."""

_IMPORT_SECONDS, _ANSWER_SECONDS = 300.0, 10.0
"""How long a spare process may take to import its modules, and to answer when it is checked."""

_LONGEST_IMPORT_SECONDS, _TAKE_SECONDS = 30.0, 1.0
"""The same when it is needed; as long as it sends heartbeats, if it still imports."""

_LONGEST_SILENCE_SECONDS = 3 * BEAT_SECONDS

_END_SECONDS = 1.0
"""How long they may take to end at the end of the run."""

_NOTHING = Loaded((), {})


@dataclass(eq=False)
class _Spare:
    """A spare process; `info` is None until it has imported its modules."""

    node: str
    actor: ActorHandle
    heart: str
    answer: ray.ObjectRef | None
    asked_at: float
    info: HostInfo | None = None
    is_stuck: bool = False
    """Whether it has not answered when it was needed; until it does, it is not asked again."""

    def ask(self) -> None:
        """Asks it for an answer, unless it already owes one."""
        if self.answer is None:
            self.answer, self.asked_at = self.actor.prepare.remote(_NOTHING), time.monotonic()

    def has_ended(self, seconds: float) -> bool:
        """Whether it has ended; waits at most so long for its answer."""
        if self.answer is not None and ray.wait([self.answer], timeout=seconds)[0]:
            try:
                self.info, self.answer, self.is_stuck = ray.get(self.answer), None, False
            except RayError:
                return True
        return False

    def is_late(self) -> bool:
        """Whether it has not answered for too long."""
        patience = _IMPORT_SECONDS if self.info is None else _ANSWER_SECONDS
        return self.answer is not None and time.monotonic() - self.asked_at > patience

    def end(self) -> None:
        """Kills the process."""
        end_process(self.actor, self.info)


class Spares:
    """The spare processes of a run, on the nodes of its pools of CPUs.

        spares = Spares(pulse, most=None)
        spares.step_begins()
        spares.look(pools)  # every now and then; does not wait
        host = spares.taken(pool, place, node)
        spares.close()

    A node gets as many as a pool has processes there, because the processes of a pool are replaced together, but at
    most `most`. Pools of GPUs get none, because Ray assigns its GPU to a process when it starts; neither do pools that
    run only reward functions.
    """

    def __init__(self, pulse: Pulse, *, most: int | None) -> None:
        self._pulse = pulse
        self._most = most
        self._num_steps = 0
        self._due = math.inf
        self._spares: list[_Spare] = []
        self._asked: list[ray.ObjectRef] = []
        self._loaded: Loaded | None = None

    def step_begins(self) -> None:
        """Spare processes are started some time after the first step, and when a step begins after a fault."""
        self._num_steps += 1
        if self._num_steps > 1 and self._due == math.inf and self._most != 0:
            self._due = time.monotonic() + (_FIRST_SECONDS if self._loaded is None else 0.0)

    def look(self, pools: Collection[PlacedPool]) -> None:
        """Starts the spare processes that are missing, and forgets those that have ended or were stopped."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_SECONDS
        on_cpus = [placed for placed in pools if placed.hosts and _is_replaceable(placed.hosts[0].pool)]
        for spare in list(self._spares):
            if spare.has_ended(0.0):
                self._spares.remove(spare)
            elif spare.is_late():
                self._spares.remove(spare)
                spare.end()
            else:
                spare.ask()
        if self._is_known(on_cpus):
            self._start_missing(on_cpus)

    def taken(self, pool: ResourcePool, place: Place, node: str | None) -> Host | None:
        """The process of a rank on this node, if a spare one has become it. One that still imports is ready sooner than
        a new one, which would also slow it down."""
        self._due = math.inf
        if pool.device != "cpu":
            return None
        for spare in sorted(self._spares, key=lambda spare: spare.info is None):
            if spare.node != node or spare.is_stuck:
                continue
            has_ended = spare.has_ended(0.0)  # an earlier answer does not tell whether it has been stopped since
            spare.ask()
            has_ended = has_ended or self._has_ended_when_needed(spare)
            spare.is_stuck = not has_ended and spare.answer is not None
            if spare.is_stuck:
                continue
            self._spares.remove(spare)
            if not has_ended:
                spare.actor.occupy.remote(place)
                return Host(pool, place.rank, spare.actor, spare.heart)
        return None

    def _has_ended_when_needed(self, spare: _Spare) -> bool:
        """Waits until a spare process has answered; returns whether it has ended instead."""
        if spare.info is not None:
            return spare.has_ended(_TAKE_SECONDS)
        logger.info("the spare process is not ready yet: waiting until it has imported its modules ...")
        until = time.monotonic() + _LONGEST_IMPORT_SECONDS
        while spare.answer is not None and time.monotonic() < until:
            if spare.has_ended(_TAKE_SECONDS):
                return True
            if self._pulse.silent_seconds(spare.heart) > _LONGEST_SILENCE_SECONDS:
                break
        return False

    def close(self) -> None:
        """Ends them: through Ray, which reports processes that end in another way, if they do so within a second."""
        self._due = math.inf
        processes = []
        for spare in self._spares:
            ray.kill(spare.actor)
            if spare.info is not None and spare.info.node == socket.gethostname():
                with suppress(psutil.NoSuchProcess):
                    processes.append(psutil.Process(spare.info.pid))
        _, left = psutil.wait_procs(processes, timeout=_END_SECONDS)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._spares.clear()

    def _is_known(self, pools: Collection[PlacedPool]) -> bool:
        """Whether the modules are known that workers import: those of the first rank of each pool."""
        if self._loaded is None and not self._asked:
            self._asked = [placed.hosts[0].actor.loaded.remote() for placed in pools]
        elif self._loaded is None and len(ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]) == 0:
            asked, self._asked = self._asked, []
            try:
                found: list[Loaded] = ray.get(asked)
            except RayError:  # a process has ended; the next look asks again
                return False
            modules = dict.fromkeys(name for each in found for name in each.modules)
            variables = {name: value for each in found for name, value in each.variables.items()}
            self._loaded = Loaded(tuple(modules), variables)
        return self._loaded is not None

    def _start_missing(self, pools: Collection[PlacedPool]) -> None:
        wanted: Counter[str] = Counter()
        for placed in pools:
            wanted |= Counter(filter(None, placed.nodes()))
        if self._most is not None:
            wanted = Counter({node: min(count, self._most) for node, count in wanted.items()})
        missing = wanted - Counter(spare.node for spare in self._spares)
        for node in missing.elements():
            self._spares.append(self._started(node, pools))

    def _started(self, node: str, pools: Collection[PlacedPool]) -> _Spare:
        place = next(iter(pools)).places[0]
        heart = self._pulse.new_key()
        options = {"num_cpus": 0, **on_node(node, **place.variables)}
        actor = cast(ActorHandle, ray.remote(SpareHost).options(**options).remote(heart=heart))
        return _Spare(node, actor, heart, actor.prepare.remote(self._loaded), time.monotonic())


def _is_replaceable(pool: ResourcePool) -> bool:
    """Whether spare processes may replace those of the pool."""
    return pool.device == "cpu" and not pool.has_only_functions
