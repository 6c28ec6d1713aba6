"""The process of an episode: what it does, and the messages on its connection, which are JSON."""

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

from hybridflow.config.carried_code import imported_code
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import (
    Answer,
    Ask,
    EpisodeOver,
    Event,
    Failed,
    Finished,
    Model,
    ModelInfo,
    Over,
    Refused,
    Reply,
    Request,
    Start,
)
from hybridflow.environments.loading import load_environment
from hybridflow.environments.mcp_servers import server_tools
from hybridflow.errors import ConfigError, EpisodeError

Code = dict[str, str]
"""The SHA-256 of each user file that a process has imported, which it sends when it is ready."""

_REQUESTS = {kind.__name__: kind for kind in (Start, Reply, Over, Refused)}
_EVENTS = {kind.__name__: kind for kind in (Ask, Finished, Failed)}


def packed(message: Request | Event) -> bytes:
    """A message as JSON. Raises `EpisodeError` for a row of the data that has other values than JSON's."""
    try:
        return json.dumps([type(message).__name__, asdict(message)]).encode()
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"A {type(message).__name__.lower()} of an episode cannot be sent to another process: {error}.",
            remedy="Rows of the data, messages and tools may hold text, numbers, lists and dictionaries;"
            " environment.processes=0 passes everything, unless several ranks hold a replica of the rollout together.",
        ) from error


def event_of(message: bytes) -> Event | Code | str:
    """An event; or the code of the environment when it is ready, or the reason why it cannot be loaded."""
    kind, content = json.loads(message)
    return _EVENTS[kind](**content) if kind in _EVENTS else content


class Questions:
    """The questions of an episode, which may ask several concurrently: they are sent one by one.

    An episode may stop waiting for a reply (`asyncio.wait_for`). The reply comes nevertheless. It is received before
    the next question, or the end of the episode, which says that nobody got it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_by_one = asyncio.Lock()
        self._coming: asyncio.Future[bytes] | None = None
        """The answer to a question, until the one who asked has received it."""

        self._is_lost = self._is_closed = False

    async def exchange(self, ask: Ask) -> Answer:
        """The answer to a question."""
        async with self._one_by_one:
            await self._receive_unwanted()
            if self._is_closed:
                raise EpisodeOver("the episode has ended")
            self._connection.send_bytes(packed(replace(ask, forgets_reply=self._is_lost)))
            self._is_lost = False
            self._coming = asyncio.ensure_future(asyncio.to_thread(self._connection.recv_bytes))
            answer = await asyncio.shield(self._coming)
            self._coming = None
        return _answer_of(answer)

    async def close(self) -> bool:
        """Sends no further questions. Returns whether the last reply came when nobody waited for it."""
        self._is_closed = True
        await self._receive_unwanted()
        return self._is_lost

    async def _receive_unwanted(self) -> None:
        if self._coming is not None:
            answer = await asyncio.shield(self._coming)
            self._coming = None
            self._is_lost |= isinstance(_answer_of(answer), Reply)


def serve_episodes(connection: Connection, setup: tuple[EnvironmentSettings, ModelInfo | None]) -> None:
    """Loads the environment, then runs episodes until disconnected."""
    config, info = setup
    try:
        environment = load_environment(config)
        server_tools(config)
    except ConfigError as error:
        connection.send_bytes(json.dumps(["error", f"{error.message} {error.remedy}"]).encode())
        return
    connection.send_bytes(json.dumps(["ready", imported_code()]).encode())

    async def episode(start: Start) -> Finished | Failed:
        questions = Questions(connection)
        ended = await run_episode(environment, config, start, Model(questions.exchange, info))
        is_lost = await questions.close()
        return replace(ended, forgets_reply=is_lost) if isinstance(ended, Finished) else ended

    while True:
        try:
            start = _request_of(connection.recv_bytes())
        except EOFError:
            return
        assert isinstance(start, Start), f"{start} without an episode"
        ended = asyncio.run(episode(start))
        with suppress(Exception):  # the environment may have closed or replaced it
            sys.stdout.flush()  # the process will be killed with whatever is still in its buffer
        connection.send_bytes(packed(ended))


def _answer_of(message: bytes) -> Answer:
    answer = _request_of(message)
    assert not isinstance(answer, Start), f"{answer} during an episode"
    return answer


def _request_of(message: bytes) -> Request:
    kind, content = json.loads(message)
    return _REQUESTS[kind](**content)
