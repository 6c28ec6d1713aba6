"""The process of an episode: what it does, and the messages on its connection, which are JSON."""

import asyncio
import json
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection

from hybridflow.config.carried_code import imported_code
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import (
    Ask,
    Event,
    Failed,
    Finished,
    Model,
    ModelInfo,
    Over,
    Reply,
    Request,
    Start,
)
from hybridflow.environments.loading import load_environment
from hybridflow.environments.mcp_servers import server_tools
from hybridflow.errors import ConfigError, EpisodeError

Code = dict[str, str]
"""The SHA-256 of each user file that a process has imported, which it sends when it is ready."""

_REQUESTS = {kind.__name__: kind for kind in (Start, Reply, Over)}
_EVENTS = {kind.__name__: kind for kind in (Ask, Finished, Failed)}


def packed(message: Request | Event) -> bytes:
    """A message as JSON. Raises `EpisodeError` for a row of the data that has other values than JSON's."""
    try:
        return json.dumps([type(message).__name__, asdict(message)]).encode()
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"A {type(message).__name__.lower()} of an episode cannot be sent to another process: {error}.",
            remedy="Rows of the data, messages and tools may hold text, numbers, lists and dictionaries;"
            " environment.processes=0 passes everything.",
        ) from error


def event_of(message: bytes) -> Event | Code | str:
    """An event; or the code of the environment when it is ready, or the reason why it cannot be loaded."""
    kind, content = json.loads(message)
    return _EVENTS[kind](**content) if kind in _EVENTS else content


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
        one_by_one = asyncio.Lock()

        async def exchange(ask: Ask) -> Reply | Over:
            async with one_by_one:  # an episode may ask for several replies concurrently
                connection.send_bytes(packed(ask))
                answer = await asyncio.to_thread(connection.recv_bytes)
            request = _request_of(answer)
            assert isinstance(request, Reply | Over), f"{request} during an episode"
            return request

        return await run_episode(environment, config, start, Model(exchange, info))

    while True:
        try:
            start = _request_of(connection.recv_bytes())
        except EOFError:
            return
        assert isinstance(start, Start), f"{start} without an episode"
        ended = asyncio.run(episode(start))
        sys.stdout.flush()  # the process will be killed with whatever is still in its buffer
        connection.send_bytes(packed(ended))


def _request_of(message: bytes) -> Request:
    kind, content = json.loads(message)
    return _REQUESTS[kind](**content)
