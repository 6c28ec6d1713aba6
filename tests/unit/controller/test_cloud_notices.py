"""The notices of clouds, from servers that answer as the metadata services do."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridflow.controller import cloud_notices
from hybridflow.controller.cloud_notices import CLOUDS, Cloud, stop_for_notice, watch_for_notice

EVENT = {"EventType": "Preempt", "Resources": ["worker-3"], "NotBefore": "Mon, 23 Nov 2026 20:00:00 GMT"}
Answers = dict[tuple[str, str], tuple[str, str, str]]
"""By method and path: the header that the request must have, its value, and the answer."""

AWS = {
    ("PUT", "/latest/api/token"): ("X-aws-ec2-metadata-token-ttl-seconds", "60", "secret"),
    ("GET", "/latest/meta-data/spot/instance-action"): ("X-aws-ec2-metadata-token", "secret", '{"action": "stop"}'),
}
GOOGLE = {("GET", "/computeMetadata/v1/instance/preempted"): ("Metadata-Flavor", "Google", "TRUE")}
AZURE = {
    ("GET", "/metadata/scheduledevents?api-version=2020-07-01"): ("Metadata", "true", json.dumps({"Events": [EVENT]})),
    ("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text"): ("Metadata", "true", "worker-3"),
}
NO_NOTICE: dict[str, Answers] = {
    "Amazon EC2": dict(list(AWS.items())[:1]),
    "Google": {key: (*value[:2], "FALSE") for key, value in GOOGLE.items()},
    "Microsoft Corporation": {
        key: (*value[:2], value[2].replace("worker-3", "worker-4" if "Events" in value[2] else "worker-3"))
        for key, value in AZURE.items()
    },
}
NOTICE: dict[str, Answers] = {"Amazon EC2": AWS, "Google": GOOGLE, "Microsoft Corporation": AZURE}


@contextmanager
def served(answers: Answers) -> Iterator[str]:
    """A metadata service; its address."""

    class Service(BaseHTTPRequestHandler):
        def answered(self) -> None:
            header, value, answer = answers.get((self.command, self.path), ("", "", ""))
            self.send_response(200 if self.headers.get(header, "none") == value else 404)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            pass

    vars_of = {"do_GET": Service.answered, "do_PUT": Service.answered}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Verbs", (Service,), vars_of)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("vendor", CLOUDS)
def test_a_cloud_announces_that_the_machine_will_be_taken_away(vendor):
    for answers, expected in ((NOTICE, True), (NO_NOTICE, False)):
        with served(answers[vendor]) as service:
            assert CLOUDS[vendor].is_announced(service) is expected


@pytest.fixture
def vendor_file(tmp_path) -> Callable[[str], object]:
    def written(vendor: str):
        (tmp_path / "vendor").write_text(f"{vendor}\n")
        return tmp_path / "vendor"

    return written


def test_a_notice_is_acted_upon_once(vendor_file):
    found, acted = [], threading.Event()

    def act(cloud: str) -> None:
        found.append(cloud)
        acted.set()

    with served(GOOGLE) as service:
        watch_for_notice(act, {"Google": replace(CLOUDS["Google"], service=service)}, vendor_file("Google"))
        assert acted.wait(10)
    assert found == ["Google Cloud"]


def test_machines_of_no_cloud_are_not_asked(vendor_file, tmp_path):
    threads = threading.active_count()
    asked = Cloud("none", "http://127.0.0.1:9", lambda service: pytest.fail("asked"))
    watch_for_notice(lambda cloud: None, {"Google": asked}, vendor_file("QEMU"))
    watch_for_notice(lambda cloud: None, {"Google": asked}, tmp_path / "none")
    assert threading.active_count() == threads


def test_a_notice_stops_the_run_by_sigusr1_if_that_is_handled(monkeypatch):
    monkeypatch.setattr(cloud_notices, "_announced", threading.Lock())
    stop_for_notice("without a handler, nothing happens")
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        stop_for_notice("AWS is about to take the machine away")
        stop_for_notice("AWS is about to take the machine away")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
