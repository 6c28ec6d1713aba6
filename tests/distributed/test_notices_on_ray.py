"""A notice of the cloud for the machine of a worker stops the run of the driver."""

import signal
import threading
import time

import pytest

from hybridflow.controller import Backend, cloud_notices
from hybridflow.controller.backends.ray import pulse

pytestmark = pytest.mark.ray


def test_a_notice_for_the_machine_of_a_worker_reaches_the_driver(ray_backend: Backend, monkeypatch):
    monkeypatch.setattr(cloud_notices, "_announced", threading.Lock())
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    driver = pulse.Pulse()
    acts = []
    monkeypatch.setattr(pulse, "watch_for_notice", acts.append)  # the machine of this test is of no cloud
    try:
        pulse.start_beating(driver.new_key(), device="cpu")
        [act] = acts
        act("AWS")
        until = time.monotonic() + 4 * pulse.BEAT_SECONDS
        while not received and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
        driver.close()
    assert received == [signal.SIGUSR1]
