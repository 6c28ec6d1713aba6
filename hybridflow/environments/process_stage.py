"""Episodes in processes of their own: an episode that hangs or crashes its process fails alone."""

import logging
import multiprocessing.connection
import time
from collections.abc import Mapping

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.hosting import event_of, packed, serve_episodes
from hybridflow.environments.interface import Ask, Event, Failed, ModelInfo, Request, Start
from hybridflow.errors import EpisodeError
from hybridflow.observability.activity import ACTIVITY
from hybridflow.rewards.runners.processes import START_SECONDS, ForkServer, ServedProcess

logger = logging.getLogger(__name__)


class EpisodeProcess(ServedProcess):
    """A process that loads the environment, then runs one episode after another until it is ended."""

    def __init__(self, server: ForkServer, config: EnvironmentSettings) -> None:
        super().__init__(server)
        self._config = config
        self._is_ready = False
        self._seconds_left = config.episode_seconds
        self._sent = time.monotonic()

    def send(self, request: Request) -> None:
        """Sends a request; if the process is dead, `receive` returns a `Failed`."""
        if isinstance(request, Start):
            self._seconds_left = self._config.episode_seconds
        self._wait_for_step()
        try:
            self.connection.send_bytes(packed(request))
        except OSError:
            return

    def receive(self) -> Event | None:
        """The next event; a `Failed` if the process is dead, None if it has only become ready.

        Raises `EpisodeError` if it cannot load the environment.
        """
        try:
            found = self.connection.recv_bytes()
        except (EOFError, OSError):
            return Failed(f"its process {self.end()}.", is_infrastructure=True)
        event = event_of(found)
        if isinstance(event, dict):
            self._server.check_code(event)
            self._is_ready = True
            self._wait_for_step()
            return None
        if isinstance(event, str):
            raise EpisodeError(
                f"A process cannot load the environment: {event}",
                remedy="Make it importable in a new process, or use environment.processes=0.",
            )
        self._seconds_left -= time.monotonic() - self._sent
        return event

    def timed_out(self) -> Failed:
        """Ends the process, which has exceeded a limit, and says which one."""
        self.end()
        if not self._is_ready:
            raise EpisodeError(
                f"A process took longer than {START_SECONDS:g} s to load the environment.",
                remedy="Importing its file must not take so long; load what is large in reset.",
            )
        name, seconds = "step_seconds", self._config.step_seconds
        if self._seconds_left < seconds:
            name, seconds = "episode_seconds", self._config.episode_seconds
        longer = f"it took longer than environment.{name}={seconds:g}; raise that setting if it needs more time."
        return Failed(longer, is_infrastructure=True)

    def excuse(self, seconds: float) -> None:
        """Moves the limits of a step, and of the episode."""
        self._sent += seconds
        self.deadline += seconds

    def _wait_for_step(self) -> None:
        self._sent = time.monotonic()
        if self._is_ready:
            self.deadline = self._sent + min(self._config.step_seconds, self._seconds_left)


class ProcessStage:
    """Runs each episode in one of `places` processes, which a fork server starts when they are needed.

    A process whose episode exceeds a limit is killed with everything it started, and replaced.
    """

    def __init__(self, config: EnvironmentSettings, places: int, info: ModelInfo | None) -> None:
        self.places: int | None = places
        self._config = config
        self._server = ForkServer(
            serve_episodes,
            (config, info),
            labels=[str(config.chosen)],
            of="environment",
            setting="environment.processes",
            error=EpisodeError,
        )
        self._idle: list[EpisodeProcess] = []
        self._busy: dict[int, EpisodeProcess] = {}
        self._acting: set[int] = set()
        """Episodes that have not said anything since the last request."""

    def send(self, requests: Mapping[int, Request]) -> None:
        if requests and not self._server.is_running:
            words = "%s: starting %d processes, each of which imports the environment and plays one episode at a time"
            limit = "(at most environment.processes=%d per rollout replica; 0 is faster if steps take microseconds)"
            logger.info(f"{words} {limit}", self._config.chosen, len(requests), self.places)
        for number, request in requests.items():
            if isinstance(request, Start):
                self._busy[number] = self._free_process()
            self._busy[number].send(request)
            self._acting.add(number)

    def receive(self, *, seconds: float) -> dict[int, Event]:
        events: dict[int, Event] = {}
        assert self._acting or not seconds, "no episode acts"
        end = time.monotonic() + seconds
        while self._acting:
            left = max(0.0, end - time.monotonic())
            self._collect(events, seconds=left)
            if events or not left:
                break
        return events

    def excuse(self, seconds: float) -> None:
        for number in self._acting:
            self._busy[number].excuse(seconds)

    def abandon(self) -> None:
        self._acting.clear()
        if not self._server.is_running:  # all processes have died with it
            self.close()
        for process in self._busy.values():
            if not process.connection.closed:
                process.end()
        self._busy.clear()

    def close(self) -> None:
        for process in (*self._busy.values(), *self._idle):
            process.connection.close()
        self._busy.clear()
        self._idle.clear()
        self._server.close()

    def _free_process(self) -> EpisodeProcess:
        """An idle process or a new one. Idle processes that have died are dropped; none of them had an episode."""
        while self._idle:
            process = self._idle.pop()
            if not process.connection.poll():  # it says nothing while it is idle
                return process
            process.end()
        self._server.start()
        return EpisodeProcess(self._server, self._config)

    def _collect(self, events: dict[int, Event], *, seconds: float) -> None:
        """Adds the events that there are; waits for one up to `seconds`, but not longer than to the first deadline."""
        if seconds:
            first = min(self._busy[number].deadline for number in self._acting)
            seconds = max(0.0, min(seconds, first - time.monotonic()))
        with ACTIVITY.waiting(seconds):
            ready = multiprocessing.connection.wait([self._busy[number].connection for number in self._acting], seconds)
        for number in list(self._acting):
            process = self._busy[number]
            if process.connection in ready:
                event = process.receive()
            elif time.monotonic() >= process.deadline:
                event = process.timed_out()
            else:
                continue
            if event is None:
                continue
            self._acting.remove(number)
            events[number] = event
            if not isinstance(event, Ask):
                del self._busy[number]
                if not process.connection.closed:
                    self._idle.append(process)
