"""A request to a server, with limits on its total time and on the size of the response."""

import functools
import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hybridflow.errors import RewardError, RewardUnavailable

_OVERLOADED = (408, 425, 429, 502, 503, 504)
_REMEDY = "Look at the server's log. reward.settings.NAME.request_seconds and answer_mb set the limits of a request."


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a whole request, and of the body of its response."""

    seconds: float
    answer_bytes: int


def posted(address: str, body: object, headers: Mapping[str, str], limits: RequestLimits) -> bytes:
    """The body of the response. Raises `RewardUnavailable`, or `RewardError` for a response that cannot be used.

    Redirects are not followed: the request and its Authorization are meant for this server alone.
    """
    data = json.dumps(body, default=str).encode()
    request = urllib.request.Request(address, data=data, headers=dict(headers), method="POST")
    watch = _Watch()
    opener = urllib.request.build_opener(_Handler(watch), _NoRedirect())
    with watch.ending_after(limits.seconds):
        try:
            with opener.open(request, timeout=limits.seconds) as answer:
                found = answer.read(limits.answer_bytes + 1)
        except urllib.error.HTTPError as error:
            raise _refusal(error, watch) from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            said = str(reason) or type(reason).__name__
            is_late = watch.has_ended or isinstance(reason, TimeoutError)
            raise RewardUnavailable(_late(limits) if is_late else said, remedy=_REMEDY) from error
    if watch.has_ended:
        raise RewardUnavailable(_late(limits), remedy=_REMEDY)
    if len(found) > limits.answer_bytes:
        raise RewardError(f"its answer has more than {limits.answer_bytes // 2**20} MiB.", remedy=_REMEDY)
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


class _Watch:
    """Shuts down the socket of a request when its time is over."""

    def __init__(self) -> None:
        self.has_ended = False
        self._socket: socket.socket | None = None

    def hold(self, connected: socket.socket) -> None:
        """Registers the socket."""
        self._socket = connected

    @contextmanager
    def ending_after(self, seconds: float) -> Iterator[None]:
        """Ends the connection if the block takes longer than `seconds`."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        self.has_ended = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    def __init__(self, *args, watch: _Watch, **settings) -> None:
        super().__init__(*args, **settings)
        self._watch = watch

    def connect(self) -> None:
        super().connect()
        self._watch.hold(self.sock)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections whose sockets are registered with the watch."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_Connection, watch=self._watch), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_SecureConnection, watch=self._watch), req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an HTTP error."""

    def redirect_request(self, req, fp, code, msg, headers, newurl) -> None:
        return None


def _refusal(error: urllib.error.HTTPError, watch: _Watch) -> RewardError:
    said = ""
    with suppress(OSError, http.client.HTTPException):
        said = error.read(300).decode(errors="replace").strip()
    if 300 <= error.code < 400:
        said = f"go to {error.headers.get('Location')}; name that address if it is right"
    message = f"status {error.code} {error.reason}{f', and it said: {said}' if said else ''}"
    kind = RewardUnavailable if error.code in _OVERLOADED or watch.has_ended else RewardError
    return kind(message, remedy=_REMEDY)


def _late(limits: RequestLimits) -> str:
    return f"it had not answered in full after request_seconds={limits.seconds:g} (timed out)"
