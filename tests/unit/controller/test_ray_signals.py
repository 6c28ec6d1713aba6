"""Signals that arrive while Ray starts reach the run's own handlers."""

import os
import signal

import pytest
import ray

from hybridflow.controller.backends.ray.cluster import _initialized
from hybridflow.elastic.stopping import Stop


def test_a_terminal_that_is_closed_while_ray_starts_stops_the_run(monkeypatch):
    def closed(**settings: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's start replaces the handler
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(ray, "init", closed)
    before, stop = signal.signal(signal.SIGHUP, signal.SIG_DFL), Stop()
    try:
        with stop.handled():
            own = signal.getsignal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                _initialized("local")
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.status == 129
