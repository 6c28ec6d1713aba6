"""The page that `hybridflow watch` serves: to whoever knows the address, on this machine, and nothing else."""

import http.client
import os
import shutil
import subprocess
from contextlib import closing
from urllib.parse import urlsplit

import psutil
import pytest

from hybridflow.errors import DataError, ResourceError
from hybridflow.observability.report.document import html_page
from hybridflow.observability.report.server import ReportServer

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("HYBRIDFLOW_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.chdir(tmp_path)
    with closing(ReportServer(lambda: "<h1>caf\u00e9</h1>")) as server:
        yield server


def answer(server, path=None, *, method="GET", host=None):
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
    connection.request(method, url.path if path is None else path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    found = response.status, response.read().decode(), dict(response.headers)
    connection.close()
    return found


def test_the_page_is_served_whole_and_is_neither_stored_nor_framed_nor_sent_elsewhere(server):
    status, text, headers = answer(server)
    assert (status, text) == (200, "<h1>caf\u00e9</h1>")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert answer(server, method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        ("/", "GET", None, 404),
        ("{path}x", "GET", None, 404),
        ("{path}../../secret.txt", "GET", None, 404),
        ("{path}%2e%2e/secret.txt", "GET", None, 404),
        ("/../secret.txt", "GET", None, 404),
        ("//etc/passwd", "GET", None, 404),
        ("file:///etc/passwd", "GET", None, 404),
        ("/caf%C3%A9", "HEAD", None, 404),
        ("{path}", "GET", "evil.example", 403),
        ("{path}", "GET", "127.0.0.1.evil.example:80", 403),
        ("{path}", "GET", "", 403),
        ("{path}", "POST", None, 501),
        ("{path}", "GET", "localhost:8123", 200),  # forwarded by ssh from another port
    ],
)
def test_other_paths_hosts_and_methods_are_refused(server, path, method, host, status):
    found, text, _ = answer(server, path.format(path=urlsplit(server.url).path), method=method, host=host)
    assert found == status and "secret" not in text and "root:" not in text


def test_it_listens_at_the_loopback_address_under_a_new_secret_each_time_and_stops(server):
    port = urlsplit(server.url).port
    [listening] = [c for c in psutil.Process().net_connections() if c.laddr.port == port and c.status == "LISTEN"]
    assert listening.laddr.ip == "127.0.0.1"
    with closing(ReportServer(str)) as other:
        assert len(urlsplit(other.url).path) > 30 and urlsplit(other.url).path != urlsplit(server.url).path
        with pytest.raises(ResourceError, match=f"--port={port} cannot be used"):
            ReportServer(str, port=port)
    with pytest.raises(ConnectionRefusedError):
        answer(other)


def test_a_page_that_cannot_be_made_is_an_error_and_the_next_one_is_served():
    pages = iter(["", DataError("no", remedy="none"), "again"])

    def page() -> str:
        found = next(pages)
        if isinstance(found, DataError):
            raise found
        return found

    with closing(ReportServer(page)) as server:
        assert [answer(server)[0] for _ in range(3)] == [200, 500, 200]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium; without it only its requests are tested")
def test_a_browser_loads_the_page_again_while_the_run_is_alive_and_keeps_what_was_open_and_scrolled(tmp_path):
    loads = []

    def page() -> str:
        loads.append(len(loads) + 1)
        act = "document.getElementById('warnings').open = true; scrollTo(0, 700)" if len(loads) == 1 else ""
        say = "setTimeout(() => { document.body.dataset.top = scrollY }, 100)"
        body = "<details id='warnings'><summary>s</summary>x</details><div style='height: 9000px'></div>"
        return html_page("run", f"{body}<script>{act}; {say}</script>", is_renewed=len(loads) < 3)

    with closing(ReportServer(page)) as server:
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000"]
        command += [f"--user-data-dir={tmp_path}", "--dump-dom", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert loads == [1, 2, 3]
    assert '<details id="warnings" open="">' in done.stdout and 'data-top="700"' in done.stdout
