"""Serves one page to this machine's browsers, under an address that contains a secret."""

import logging
import secrets
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

from hybridflow.errors import ResourceError

logger = logging.getLogger(__name__)

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")
"""Names that a request may use for this machine: a page of another site that resolves to it has another name."""

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ReportServer:
    """Serves what `page` returns, at `url` and nowhere else, from construction until `close`.

    It listens at 127.0.0.1 only. The path of a request is compared with that of `url` and names no file: what a request
    reads is what `page` reads. Port 0 chooses a free port.

        with contextlib.closing(ReportServer(page)) as server:
            print(server.url)       # http://127.0.0.1:40123/3xW.../
    """

    def __init__(self, page: Callable[[], str], *, port: int = 0) -> None:
        path = f"/{secrets.token_urlsafe(24)}/"
        try:
            self._server = ThreadingHTTPServer((_ADDRESS, port), partial(_Handler, page, path))
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"--port={port} cannot be used: {error}.", remedy="Leave it out to use any free port, or give another."
            ) from error
        self.url = f"http://{_ADDRESS}:{self._server.server_port}{path}"
        self._thread = Thread(target=self._server.serve_forever, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for one path."""

    timeout = 10.0

    def __init__(
        self,
        page: Callable[[], str],
        path: str,
        request: socket.socket,
        client_address: tuple[str, int],
        server: ThreadingHTTPServer,
    ) -> None:
        self._page, self._path = page, path
        super().__init__(request, client_address, server)  # answers the request

    def do_GET(self) -> None:
        """Sends the page."""
        if not self._is_allowed():
            return
        try:
            content = self._page().encode("utf-8", "replace")
        except Exception as error:  # noqa: BLE001 (the run may be changing its files; the next request reads them again)
            logger.warning("the report could not be made: %s: %s", type(error).__name__, error)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._answer(HTTPStatus.OK, content)

    def do_HEAD(self) -> None:
        """Says that the page can be loaded."""
        if self._is_allowed():
            self._answer(HTTPStatus.OK)

    def _is_allowed(self) -> bool:
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in _HOSTS:
            self._answer(HTTPStatus.FORBIDDEN)
        elif not secrets.compare_digest(urlsplit(self.path).path.encode(), self._path.encode()):
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def _answer(self, status: HTTPStatus, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if content:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        """The `Server` header."""
        return "hybridflow"

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged."""
