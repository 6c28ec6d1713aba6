"""Task sets of verifiers v1 (`Taskset`): its own agent plays each task with this run's model, and the task scores it.

The column `task` of a row has the index of its task in the task set. `environment.settings` has `taskset` and `agent`,
which are the fields of verifiers' configurations of these names. Without further settings, the model chats without
tools (the harness `null`), and programs run on this machine (the runtime `subprocess`).
"""

import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Make, Methods
from hybridflow.environments.endpoint import Endpoint
from hybridflow.environments.interface import EpisodeOver, Model
from hybridflow.errors import EpisodeError

_COLUMN = "task"


class _Reward(Protocol):
    value: float | None


class _Trace(Protocol):
    ok: bool
    reward: float
    rewards: Mapping[str, "_Reward"]
    metrics: Mapping[str, object]
    last_error: object


class _Agent(Protocol):
    def run(self, task: object) -> Awaitable[_Trace]: ...


class _Tasks:
    """The tasks of a task set, which may have no end, loaded as far as they are needed."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._loaded: list[object] = []
        self._coming: Iterator[object] | None = None

    def task(self, row: Mapping[str, object], settings: Mapping[str, object]) -> object:
        """The task of a row; raises `EpisodeError` if it names none."""
        index = row.get(_COLUMN)
        if not isinstance(index, int) or index < 0:
            raise EpisodeError(
                f"a row of the data has the {_COLUMN} {index!r}.",
                remedy=f"Give each row a column '{_COLUMN}', the index of its task in the task set.",
            )
        if self._coming is None:
            self._coming = iter(_task_set(self._make, settings))
        while len(self._loaded) <= index:
            task = next(self._coming, None)
            if task is None:
                raise EpisodeError(
                    f"a row of the data has the {_COLUMN} {index}; the task set has {len(self._loaded)} tasks.",
                    remedy=f"Give each row a column '{_COLUMN}', the index of its task in the task set, from 0.",
                )
            self._loaded.append(task)
        return self._loaded[index]


def _task_set(make: Make, settings: Mapping[str, object]) -> Iterable[object]:
    """The task set, made with its own kind of configuration if it is a class."""
    if not inspect.isclass(make):
        return make(**settings)  # pyright: ignore[reportReturnType]
    base = _member("TasksetConfig")
    kind: Make = _member("concrete_type", "utils.generic")(make, base, origin=_member("Taskset")) or base  # pyright: ignore[reportAssignmentType]
    return make(kind(**settings))  # pyright: ignore[reportReturnType, reportCallIssue]


def _agent(endpoint: Endpoint, settings: Mapping[str, object]) -> _Agent:
    """An agent of verifiers whose model is that of the endpoint."""
    os.environ |= endpoint.variables  # a process runs one episode at a time
    client = {"type": "eval", "base_url": endpoint.variables["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    given = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **settings}
    config = _member("AgentConfig")(**given, model="policy", client=client)
    return _member("Agent")(config)  # pyright: ignore[reportReturnType]


def _member(name: str, module: str = "") -> Make:
    """A class or function of verifiers, which the user's task set has imported."""
    return vars(sys.modules[f"verifiers.v1.{module}".rstrip(".")])[name]


def _recognizes(methods: Methods) -> bool:
    return {"load", "include", "exclude", "shuffle", "select"} <= set(methods)


def _adapted(make: Make) -> Callable[..., object]:
    tasks = _Tasks(make)

    async def episode(
        model: Model,
        row: Mapping[str, object],
        seed: int,
        *,
        taskset: Mapping[str, object] | None = None,
        agent: Mapping[str, object] | None = None,
    ) -> tuple[float, dict]:
        task = tasks.task(row, taskset or {})
        with Endpoint(model) as endpoint:
            trace = await _agent(endpoint, agent or {}).run(task)
        if not trace.ok and endpoint.over is not None:
            raise EpisodeOver(endpoint.over)
        if not trace.ok:
            raise EpisodeError(f"its agent failed: {trace.last_error}", remedy="Fix the task, its harness or runtime.")
        if not model.num_replies:
            raise EpisodeError(
                "its agent ended without a reply of the model.", remedy="Use a harness that asks for one."
            )
        return trace.reward, {**trace.metrics, **{name: reward.value for name, reward in trace.rewards.items()}}

    return episode


VERIFIERS = Adapter("a task set of verifiers (Taskset)", _recognizes, _adapted, is_coroutine=True)
