"""A request to a server, with limits on its total time and on the size of the response."""

import functools
import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from hybridflow.errors import RewardError, RewardUnavailable

_OVERLOADED = (408, 425, 429, 502, 503, 504)
_REMEDY = "Look at the server's log. reward.settings.NAME.request_seconds and answer_mb set the limits of a request."


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request: seconds from connecting to the last byte, and bytes of the response body."""

    seconds: float
    answer_bytes: int


def posted(address: str, body: object, headers: Mapping[str, str], limits: RequestLimits) -> bytes:
    """POSTs JSON and returns the body of the response.

    Raises `RewardUnavailable`, or `RewardError` for a response that cannot be used. Redirects are not followed, because
    the request and its Authorization are meant for this server alone.
    """
    data = json.dumps(body, default=str).encode()
    request = urllib.request.Request(address, data=data, headers=dict(headers), method="POST")
    handler = _Handler()
    late = RewardUnavailable(
        f"no complete response after request_seconds={limits.seconds:g} (timed out)", remedy=_REMEDY
    )
    timer = threading.Timer(limits.seconds, handler.end)
    timer.daemon = True
    timer.start()
    try:
        with urllib.request.build_opener(handler, _NoRedirect()).open(request, timeout=limits.seconds) as response:
            found = response.read(limits.answer_bytes + 1)
    except urllib.error.HTTPError as error:
        raise _refusal(error, is_late=handler.has_ended) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if handler.has_ended or isinstance(reason, TimeoutError):
            raise late from error
        raise RewardUnavailable(str(reason) or type(reason).__name__, remedy=_REMEDY) from error
    finally:
        timer.cancel()
    if handler.has_ended:
        raise late
    if len(found) > limits.answer_bytes:
        raise RewardError(f"its response has more than {limits.answer_bytes // 2**20} MiB.", remedy=_REMEDY)
    return found


def unreachable(address: str, seconds: float) -> str:
    """Why an address cannot be connected to; empty if it can be, or if a proxy is used for it."""
    parts = urllib.parse.urlsplit(address)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens a connection that another thread can end."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False
        self.socket: socket.socket | None = None

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_Connection, handler=self), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_SecureConnection, handler=self), req)

    def end(self) -> None:
        """Shuts down the socket, at which reading from it ends."""
        self.has_ended = True
        if self.socket is not None:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    def __init__(self, *args, handler: _Handler, **settings) -> None:
        super().__init__(*args, **settings)
        self._handler = handler

    def connect(self) -> None:
        super().connect()
        self._handler.socket = self.sock


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTP error."""

    def redirect_request(self, req, fp, code, msg, headers, newurl) -> None:
        return None


def _refusal(error: urllib.error.HTTPError, *, is_late: bool) -> RewardError:
    said = ""
    with suppress(OSError, http.client.HTTPException):
        said = error.read(300).decode(errors="replace").strip()
    if 300 <= error.code < 400:
        said = f"go to {error.headers.get('Location')}; use that address if it is right"
    message = f"status {error.code} {error.reason}{f': {said}' if said else ''}"
    kind = RewardUnavailable if error.code in _OVERLOADED or is_late else RewardError
    return kind(message, remedy=_REMEDY)
