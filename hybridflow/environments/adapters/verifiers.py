"""Task sets of verifiers v1 (`Taskset`): its own agent plays each task with this run's model, and the task scores it.

The column `task` of a row has the index of its task in the task set. `environment.settings` has `taskset` and `agent`,
which are the fields of verifiers' configurations of these names. Without further settings, the model chats without
tools of its own (the harness `null`), and programs run on this machine (the runtime `subprocess`).
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

KEY_VARIABLE = "HYBRIDFLOW_ENDPOINT_API_KEY"
"""Where verifiers' client finds the key of the endpoint; OpenAI's own variables stay as they are, for judges."""

_COLUMN = "task"
_AT_A_LIMIT = ("HarnessError", "ProviderError")
"""How an agent fails whose model does not reply any more."""

_INFRASTRUCTURE = ("InterceptionError", "SandboxError", "ToolsetError", "TunnelError")
_SHOWN_CHARACTERS = 300


class _Error(Protocol):
    type: str
    message: str


class _Reward(Protocol):
    value: float


class _Trace(Protocol):
    ok: bool
    stop_condition: str | None
    reward: float
    rewards: Mapping[str, _Reward | None]
    metrics: Mapping[str, object]
    last_error: _Error | None


class _Agent(Protocol):
    def run(self, task: object) -> Awaitable[_Trace]: ...


class _Tasks:
    """The tasks of a task set, which may have no end, loaded as far as they are needed."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._loaded: list[object] = []
        self._remaining: Iterator[object] | None = None

    def task(self, row: Mapping[str, object], settings: Mapping[str, object]) -> object:
        """The task of a row; raises `EpisodeError` if it names none."""
        index = row.get(_COLUMN)
        if not isinstance(index, int) or index < 0:
            raise EpisodeError(
                f"a row of the data has the {_COLUMN} {index!r}.",
                remedy=f"Give each row a column '{_COLUMN}', the index of its task in the task set.",
            )
        try:
            self._load(index + 1, settings)
        except BaseException:
            self._loaded, self._remaining = [], None  # a generator that has raised yields nothing more
            raise
        if index >= len(self._loaded):
            raise EpisodeError(
                f"a row of the data has the {_COLUMN} {index}; the task set has {len(self._loaded)} tasks.",
                remedy=f"Give each row a column '{_COLUMN}', the index of its task in the task set, from 0.",
            )
        return self._loaded[index]

    def _load(self, count: int, settings: Mapping[str, object]) -> None:
        if self._remaining is None:
            self._remaining = iter(_task_set(self._make, settings))
        while len(self._loaded) < count and (task := next(self._remaining, None)) is not None:
            self._loaded.append(task)


def _task_set(make: Make, settings: Mapping[str, object]) -> Iterable[object]:
    """The task set, made with its own kind of configuration if it is a class."""
    if not inspect.isclass(make):
        return make(**settings)  # pyright: ignore[reportReturnType]
    base = _member("TasksetConfig")
    kind: Make = _member("concrete_type", "utils.generic")(make, base, origin=_member("Taskset")) or base  # pyright: ignore[reportAssignmentType]
    config = kind(**settings)
    if make.toolsets(config):  # pyright: ignore[reportAttributeAccessIssue]
        raise EpisodeError(
            f"the task set {make.__name__} has tool servers that all tasks share, which are not started here.",
            remedy="Give them to each task (Task.toolsets).",
        )
    return make(config)  # pyright: ignore[reportReturnType, reportCallIssue]


def _agent(endpoint: Endpoint, settings: Mapping[str, object]) -> _Agent:
    """An agent of verifiers whose model is that of the endpoint."""
    if own := {"client", "model", "retries"} & settings.keys():
        raise EpisodeError(
            f"environment.settings.agent has {sorted(own)[0]}, which the run decides.",
            remedy="Leave it out; environment.retries starts episodes again.",
        )
    client = {"type": "eval", "base_url": endpoint.variables["OPENAI_BASE_URL"], "api_key_var": KEY_VARIABLE}
    given = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **settings}
    config = _member("AgentConfig")(**given, model="policy", client=client)
    return _member("Agent")(config)  # pyright: ignore[reportReturnType]


def _member(name: str, module: str = "") -> Make:
    """A class or function of verifiers, which the user's task set has imported."""
    return vars(sys.modules[f"verifiers.v1.{module}".rstrip(".")])[name]


async def _played(model: Model, task: object, settings: Mapping[str, object]) -> tuple[_Trace, str | None]:
    """The trace of a task, and the limit that it has reached."""
    with Endpoint(model) as endpoint:
        os.environ[KEY_VARIABLE] = endpoint.variables["OPENAI_API_KEY"]  # a process runs one episode at a time
        try:
            return await _agent(endpoint, settings).run(task), endpoint.over
        finally:
            del os.environ[KEY_VARIABLE]


def _outcome(trace: _Trace, over: str | None) -> tuple[float, dict]:
    """The reward of a trace, and its rewards and metrics. Raises `EpisodeOver` if it failed because of a limit."""
    error, kind, reason = trace.last_error, None, f"it stopped: {trace.stop_condition}"
    if error is not None:
        kind, reason = error.type, f"{error.type}: {error.message[:_SHOWN_CHARACTERS]}"
    if not trace.ok and over is not None and kind in _AT_A_LIMIT:
        raise EpisodeOver(over)
    if not trace.ok and kind in _INFRASTRUCTURE:
        raise OSError(reason)
    if not trace.ok:
        raise EpisodeError(f"its agent failed: {reason}.", remedy="Fix the task, its harness or its runtime.")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if missing := trace.rewards.keys() - rewards.keys():
        raise EpisodeError(
            f"its task has no {', '.join(sorted(missing))}: {reason}.", remedy="Allow more time for its scoring."
        )
    return trace.reward, {**trace.metrics, **rewards}


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
        trace, over = await _played(model, tasks.task(row, taskset or {}), agent or {})
        outcome = _outcome(trace, over)
        if not model.num_replies:
            raise EpisodeError(
                "its agent ended without a reply of the model.", remedy="Use a harness that asks for one."
            )
        return outcome

    return episode


VERIFIERS = Adapter(
    "a task set of verifiers (Taskset)", _recognizes, _adapted, is_coroutine=True, own_settings=("taskset", "agent")
)
