"""An OpenAI-style endpoint on this machine, with which a program asks the model for replies in one episode."""

import asyncio
import concurrent.futures
import hmac
import json
import logging
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from weakref import WeakSet

from hybridflow.environments.chat_completions import ChatCompletions, RequestError
from hybridflow.environments.interface import EpisodeOver, Model
from hybridflow.errors import EpisodeError

logger = logging.getLogger(__name__)

_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"
_JSON, _EVENTS = "application/json", "text/event-stream"
_MOST_BYTES = 64 << 20
_HAS_CLOSED = "the program has closed its connection: %s"
_CHECK_SECONDS = 0.2
"""How often a request that waits for a reply looks whether the program has closed its connection."""


class Endpoint:
    """Serves `POST /v1/chat/completions` on a port of 127.0.0.1, with a key of its own, until it is left.

    Must be entered in the event loop in which `model` replies.

        with Endpoint(model) as endpoint:
            await run(program, env=os.environ | endpoint.variables)
    """

    def __init__(self, model: Model) -> None:
        self.over: str | None = None
        """The limit that the episode has reached, once a request was refused because of it."""

        self._model = model
        self._chat = ChatCompletions()
        self._key = f"hf-{secrets.token_hex(16)}"
        self._loop = asyncio.get_running_loop()
        self._server = _Server(self)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which OpenAI's clients find it."""
        return {"OPENAI_BASE_URL": f"http://127.0.0.1:{self._server.server_port}/v1", "OPENAI_API_KEY": self._key}

    def check_key(self, header: str | None) -> None:
        """Raises `RequestError` unless the header has this episode's key."""
        given = (header or "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RequestError(
                "The key is not that of a running episode; send the value of OPENAI_API_KEY.",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    def completion(self, body: bytes, is_gone: Callable[[], bool]) -> tuple[bytes, str]:
        """The response to a request and its media type; waits for the model's reply, until the program `is_gone`.

        Called by the server's threads.
        """
        question = self._chat.question(body)
        asked = asyncio.run_coroutine_threadsafe(self._model.reply(question.messages, tools=question.tools), self._loop)
        while not asked.done():
            concurrent.futures.wait([asked], _CHECK_SECONDS)
            if not asked.done() and is_gone() and asked.cancel():
                # clients close the connection at their time limit, and send the request again
                raise RequestError(
                    "The connection was closed before the reply; keep it open, also for writing, until the response.",
                    code="connection_closed",
                )
        try:
            completion = self._chat.answer(question, asked.result())
        except EpisodeError as error:
            raise RequestError(str(error)) from error
        except EpisodeOver as over:
            self.over = str(over)
            raise RequestError(
                f"The episode has reached its limit ({over}), so the model does not reply any more.",
                code="context_length_exceeded",
            ) from over
        except concurrent.futures.CancelledError as error:
            raise RequestError("The episode has ended.", status=HTTPStatus.GONE, code="episode_ended") from error
        if question.is_streamed:
            return completion.events(with_usage=question.streams_usage), _EVENTS
        return completion.response(), _JSON


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a request may wait for a reply when the episode ends

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = endpoint
        self._connections: WeakSet[socket.socket] = WeakSet()

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def server_close(self) -> None:
        """Also closes the connections that a program has left open, which ends the threads that read from them."""
        super().server_close()
        for connection in [*self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if isinstance(error := sys.exception(), OSError):
            logger.debug(_HAS_CLOSED, error)
        else:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _endpoint(self) -> Endpoint:
        assert isinstance(self.server, _Server), f"{self.server}"
        return self.server.endpoint

    def do_POST(self) -> None:
        self._answer(_CHAT, lambda body: self._endpoint.completion(body, self._is_gone))

    def do_GET(self) -> None:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "hybridflow"}
        self._answer(_MODELS, lambda _: (json.dumps({"object": "list", "data": [model]}).encode(), _JSON))

    def _answer(self, path: str, response: Callable[[bytes], tuple[bytes, str]]) -> None:
        """Sends the response to a request for a path, or what is wrong with the request."""
        try:
            body = self._body()
            self._endpoint.check_key(self.headers.get("Authorization"))
            if self.path.split("?")[0] != path:
                raise RequestError(
                    f"There is no {self.path}; the endpoint has POST {_CHAT} and GET {_MODELS}.",
                    status=HTTPStatus.NOT_FOUND,
                    code="not_found",
                )
            self._send(HTTPStatus.OK, *response(body))
        except RequestError as error:
            self._send(error.status, json.dumps(error.content()).encode(), _JSON)

    def _is_gone(self) -> bool:
        """Whether the program has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _body(self) -> bytes:
        missing = "0" if self.command == "GET" else ""
        length = "" if "Transfer-Encoding" in self.headers else self.headers.get("Content-Length", missing)
        if not length.isdecimal():
            self.close_connection = True
            raise RequestError(
                "A request needs a Content-Length.", status=HTTPStatus.LENGTH_REQUIRED, code="length_required"
            )
        if (size := float(length)) > _MOST_BYTES:  # int() refuses thousands of digits
            self.close_connection = True
            raise RequestError(
                f"The body has more than {_MOST_BYTES} bytes.",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="request_too_large",
            )
        body = self.rfile.read(int(size))
        if len(body) < size:
            raise RequestError(f"The body ended after {len(body)} of {size:.0f} bytes.", code="incomplete_body")
        return body

    def _send(self, status: int, body: bytes, media_type: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError as error:
            logger.debug(_HAS_CLOSED, error)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
