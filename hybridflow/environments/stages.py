"""Stages, on which episodes run: in the rollout's own process, or each in a process with time limits."""

from collections.abc import Coroutine, Generator, Mapping
from typing import Protocol

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import (
    Answer,
    Ask,
    Event,
    Failed,
    Finished,
    Model,
    ModelInfo,
    Request,
    Start,
)
from hybridflow.environments.loading import LoadedEnvironment, load_environment
from hybridflow.environments.process_stage import ProcessStage
from hybridflow.errors import EpisodeError
from hybridflow.observability.activity import ACTIVITY, FOREVER
from hybridflow.process import num_cores

_PER_CORE, _LEAST, _MOST = 8, 16, 64
"""Default processes of a rank, per CPU core and in all: environments mostly wait, but importing them takes CPU time."""


class Stage(Protocol):
    """Episodes by number. An episode that has finished or failed frees its place."""

    places: int | None
    """How many episodes it can hold at once; None for any number."""

    def send(self, requests: Mapping[int, Request]) -> None:
        """Starts episodes, or answers what they asked. Each of them then acts until it says something."""
        ...

    def receive(self, *, seconds: float) -> dict[int, Event]:
        """Events since the last call. Waits for one up to `seconds`; some episode must then be acting."""
        ...

    def excuse(self, seconds: float) -> None:
        """Gives episodes that act more time: nothing has called `receive` for so long."""
        ...

    def abandon(self) -> None:
        """Ends all episodes."""
        ...

    def close(self) -> None:
        """Abandons all episodes, and ends the processes."""
        ...


def make_stage(config: EnvironmentSettings, info: ModelInfo) -> Stage:
    """The stage for `environment.processes`. Raises `ConfigError` if the environment cannot be loaded."""
    environment = load_environment(config)
    processes = _num_processes(config, environment)
    if not processes:
        return LocalStage(environment, config, info)
    return ProcessStage(config, processes, info if environment.needs_info else None)


def runs_in_processes(config: EnvironmentSettings) -> bool:
    """Whether episodes run in processes of their own. Raises `ConfigError` if the environment cannot be loaded."""
    return _num_processes(config, load_environment(config)) > 0


def _num_processes(config: EnvironmentSettings, environment: LoadedEnvironment) -> int:
    if config.processes is not None:
        return config.processes
    if environment.is_trusted:
        return 0
    return min(max(_LEAST, _PER_CORE * num_cores()), _MOST)


class LocalStage:
    """Runs episodes in this process, one step after another."""

    def __init__(self, environment: LoadedEnvironment, config: EnvironmentSettings, info: ModelInfo) -> None:
        self.places: int | None = None
        self._environment = environment
        self._config = config
        self._info = info
        self._episodes: dict[int, Coroutine[Ask, Answer | None, Finished | Failed]] = {}
        self._events: dict[int, Event] = {}

    def send(self, requests: Mapping[int, Request]) -> None:
        with ACTIVITY.waiting(FOREVER):
            self._events |= {number: self._advance(number, request) for number, request in requests.items()}

    def receive(self, *, seconds: float) -> dict[int, Event]:
        assert self._events or not seconds, "no episode acts"
        events, self._events = self._events, {}
        return events

    def excuse(self, seconds: float) -> None:
        """There are no time limits here."""

    def abandon(self) -> None:
        for episode in self._episodes.values():
            episode.close()
        self._episodes.clear()
        self._events.clear()

    def close(self) -> None:
        self.abandon()

    def _advance(self, number: int, request: Request) -> Event:
        if isinstance(request, Start):
            model = Model(_suspended, self._info)
            self._episodes[number] = run_episode(self._environment, self._config, request, model)
        try:
            event = self._episodes[number].send(None if isinstance(request, Start) else request)
        except StopIteration as end:
            del self._episodes[number]
            return end.value
        if isinstance(event, Ask):
            return event
        raise EpisodeError(
            "An episode waits for something other than the model, which needs an event loop.",
            remedy="Set environment.processes to 1 or more.",
        )


class _Suspension:
    """Suspends a coroutine with a question; what it is sent is the result."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __await__(self) -> Generator[Ask, Answer, Answer]:
        return (yield self._ask)


async def _suspended(ask: Ask) -> Answer:
    return await _Suspension(ask)
