"""Tools of MCP servers (Model Context Protocol), which run as processes that speak on standard input and output."""

import asyncio
import inspect
import json
import os
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import ModuleType
from typing import Protocol

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.interface import Tool
from hybridflow.environments.tools import CallableTool, ToolAnswer
from hybridflow.errors import ConfigError, EpisodeError
from hybridflow.optional import require

START_SECONDS = 100.0
"""Time limit for the start of a server: less than that of the process that starts it."""

_MOST_PAGES = 100
"""Maximum number of pages of a server's list of tools."""

_CONNECTION_CLOSED = -32000
"""The code of the error that the package `mcp` raises for requests to a server that has ended. JSON-RPC leaves this
code to servers, which may use it too."""


class _Message(Protocol):
    """A message of the protocol, as the package `mcp` represents it."""

    def model_dump(self, *, by_alias: bool, mode: str) -> dict: ...


class _Session(Protocol):
    async def initialize(self) -> object: ...

    async def list_tools(self, **page: object) -> _Message: ...

    async def call_tool(self, name: str, arguments: dict) -> _Message: ...

    async def send_ping(self) -> object: ...


class McpServers:
    """Servers that have started, and their tools.

    A thread with an event loop of its own speaks with them, so that they outlive the event loop of an episode.
    `seconds` limits each call, and `start_seconds` the start of each server.

        servers = McpServers(["python server.py"], seconds=30)
        toolbox = Toolbox(servers.tools)
        servers.close()
    """

    def __init__(self, commands: Sequence[str], *, seconds: float, start_seconds: float = START_SECONDS) -> None:
        """Starts the servers. Raises `ConfigError` if one of them does not start, or two tools have the same name."""
        self._mcp, self._seconds, self._start_seconds = require("mcp"), seconds, start_seconds
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready: Future[list[CallableTool]] = Future()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run(commands)], daemon=True)
        self._thread.start()
        self.tools: list[CallableTool] = self._ready.result()

    @property
    def is_running(self) -> bool:
        """Whether the servers answer; false after the connection to one of them was lost."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def close(self) -> None:
        """Ends the servers."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(self._seconds)

    async def _run(self, commands: Sequence[str]) -> None:
        """Holds the connections until `close`. Errors of a server that is being ended are of no interest."""
        with suppress(Exception):
            async with AsyncExitStack() as stack:
                try:
                    listed = [(each, tool) for each in commands for tool in await self._started(each, stack)]
                    _check_names(listed)
                    self._ready.set_result([tool for _, tool in listed])
                except ConfigError as error:
                    self._ready.set_exception(error)
                    return
                await self._stopped.wait()

    async def _started(self, command: str, stack: AsyncExitStack) -> list[CallableTool]:
        try:
            async with asyncio.timeout(self._start_seconds):
                session = await _connected(self._mcp, command, stack)
                await session.initialize()
                listed = await _listed(self._mcp, session, command)
        except ConfigError:
            raise
        except Exception as error:
            late = f"it has not answered within {self._start_seconds:g} s"
            why = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"environment.mcp: the server '{command}' does not start: {why}.",
                remedy="Try the command in a shell: it must speak the protocol on standard input and output.",
            ) from error
        return [CallableTool(_schema(tool), partial(self._call, session, tool["name"])) for tool in listed]

    def _call(self, session: _Session, name: str, arguments: dict) -> ToolAnswer:
        """The answer of a tool. Raises `OSError` if the server is lost or does not answer in time, and ends it then."""
        if not self.is_running:
            raise ConnectionError(f"the MCP server of the tool '{name}' has ended")
        running = asyncio.run_coroutine_threadsafe(session.call_tool(name, arguments), self._loop)
        try:
            answer = running.result(self._seconds).model_dump(by_alias=True, mode="json")
        except TimeoutError:
            running.cancel()
            self.close()
            raise TimeoutError(f"the tool '{name}' took longer than {self._seconds:g} s") from None
        except Exception as error:
            if self._says_closed(error) and self._is_lost(session):
                self.close()
                raise ConnectionError(f"the MCP server of the tool '{name}' has ended") from error
            raise EpisodeError(f"Error: {error}", remedy="Call it differently.") from error
        return ToolAnswer(f"Error: {_text(answer)}" if answer.get("isError") else _text(answer))

    def _is_lost(self, session: _Session) -> bool:
        """Whether a server does not answer any more."""
        running = asyncio.run_coroutine_threadsafe(session.send_ping(), self._loop)
        wait([running], self._seconds)
        return not running.done() or self._says_closed(running.exception())

    def _says_closed(self, error: object) -> bool:
        """Whether an error is that of a closed connection, or has its code."""
        names = vars(self._mcp)
        if isinstance(error, names["MCPError"] if "MCPError" in names else names["McpError"]):  # before version 2
            return error.error.code == _CONNECTION_CLOSED  # pyright: ignore[reportAttributeAccessIssue]
        return type(error).__name__ in ("BrokenResourceError", "ClosedResourceError")  # of anyio, when it cannot write


_running: dict[tuple[str, ...], McpServers] = {}
"""The servers of this process, which serve one episode after another."""


def server_tools(config: EnvironmentSettings) -> list[CallableTool]:
    """The tools of the servers in `environment.mcp`, which are started if they do not run in this process."""
    key = tuple(config.mcp)
    if not key:
        return []
    if key not in _running or not _running[key].is_running:
        _running[key] = McpServers(key, seconds=config.step_seconds)
    return _running[key].tools


def check_servers(config: EnvironmentSettings) -> None:
    """Starts and ends the servers once. Raises `ConfigError` for those that no episode could use; see `McpServers`."""
    McpServers(config.mcp, seconds=config.step_seconds).close()


async def _connected(mcp: ModuleType, command: str, stack: AsyncExitStack) -> _Session:
    """Starts a server, and connects to it until the stack is closed."""
    words = shlex.split(command)
    server = mcp.StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
    streams = await stack.enter_async_context(mcp.stdio_client(server))
    return await stack.enter_async_context(mcp.ClientSession(*streams))


async def _listed(mcp: ModuleType, session: _Session, command: str) -> list[dict]:
    """The tools of all pages of a server's list. Raises `ConfigError` if the list does not end."""
    found, page = [], {}
    by_params = "params" in inspect.signature(session.list_tools).parameters  # since version 2
    for _ in range(_MOST_PAGES):
        listed = (await session.list_tools(**page)).model_dump(by_alias=True, mode="json")
        found += listed["tools"]
        if not (cursor := listed.get("nextCursor")):
            return found
        page = {"params": mcp.types.PaginatedRequestParams(cursor=cursor)} if by_params else {"cursor": cursor}
    raise ConfigError(
        f"environment.mcp: the list of tools of the server '{command}' has more than {_MOST_PAGES} pages.",
        remedy="Its last page must have no nextCursor.",
    )


def _check_names(listed: Sequence[tuple[str, CallableTool]]) -> None:
    """Raises `ConfigError` if two tools have the same name; each comes with the command of its server."""
    owners: dict[str, str] = {}
    for command, tool in listed:
        if tool.name in owners:
            raise ConfigError(
                f"environment.mcp: two tools are named '{tool.name}': one of the server '{owners[tool.name]}', and one"
                f" of the server '{command}'.",
                remedy="Rename one of them, or leave out one of the servers.",
            )
        owners[tool.name] = command


def _text(answer: dict) -> str:
    """The text of an answer, which may be in embedded resources; or its structured content, if it has no other."""
    if not answer["content"] and answer.get("structuredContent") is not None:
        return json.dumps(answer["structuredContent"], ensure_ascii=False)
    parts = [part["resource"] if part["type"] == "resource" else part for part in answer["content"]]
    kinds = [part["type"] for part in answer["content"]]
    return "\n".join(part.get("text", f"[{kind}]") for part, kind in zip(parts, kinds, strict=True))


def _schema(tool: dict) -> Tool:
    """The schema of a listed tool, in the form that chat templates expect."""
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}
