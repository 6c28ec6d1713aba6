"""When work is left and when it is finished, once a signal has come."""

import os
import signal
import time

import pytest

from hybridflow.elastic.stopping import Abandoned, Stop


def stopped_in(stop: Stop, *, changing: bool, usual: float | None, seconds: float, takes: float) -> float:
    """Seconds until work that takes so many is left by `Abandoned`; raises TimeoutError where it goes on to its end."""
    began = time.monotonic()
    with (
        stop.handled(),
        stop.gracefully(seconds, in_process=True, saves=True),
        stop.abandonable(lambda: changing, usual_seconds=usual),
    ):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            while time.monotonic() < began + takes:
                time.sleep(0.01)
        except Abandoned:
            return time.monotonic() - began
    raise TimeoutError


@pytest.mark.parametrize(
    ("changing", "usual", "seconds", "save_seconds", "left_between"),
    [
        pytest.param(False, 100.0, 25.0, None, (0.0, 2.0), id="would not end in time"),
        pytest.param(False, 1.0, 10.0, 8.0, (0.0, 2.0), id="no time for it before a checkpoint like the last"),
        pytest.param(False, None, 2.0, None, (0.5, 5.0), id="unknown: half of the time"),
        pytest.param(True, 100.0, 2.0, None, (1.0, 6.0), id="changing, until the time is up"),
        pytest.param(True, 100.0, 10.0, 8.0, (1.9, 5.0), id="changing, while a checkpoint still fits after it"),
    ],
)
def test_work_is_abandoned(changing, usual, seconds, save_seconds, left_between):
    stop = Stop()
    stop.save_seconds = save_seconds
    low, high = left_between
    assert low < stopped_in(stop, changing=changing, usual=usual, seconds=seconds, takes=9.0) < high


@pytest.mark.parametrize(("changing", "usual"), [(False, 0.5), (True, 100.0)])
def test_work_that_ends_in_time_or_changes_something_is_finished(changing, usual):
    with pytest.raises(TimeoutError):
        stopped_in(Stop(), changing=changing, usual=usual, seconds=25.0, takes=0.5)


def test_a_notice_is_never_a_second_signal():
    stop = Stop()
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.status == 75
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.status == 75


def test_the_second_signal_raises_and_handlers_are_put_back():
    before, stop = signal.getsignal(signal.SIGINT), Stop()
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGINT and stop.status == 130
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before and stop.status == 130


@pytest.mark.parametrize(
    ("first", "second", "seconds_between"),
    [
        pytest.param(signal.SIGHUP, signal.SIGHUP, 0.02, id="terminal and shell"),
        pytest.param(signal.SIGTERM, signal.SIGHUP, 0.3, id="systemd"),
        pytest.param(signal.SIGTERM, signal.SIGHUP, 1.1, id="a hangup, however late"),
        pytest.param(signal.SIGTERM, signal.SIGTERM, 0.0, id="timeout"),
    ],
)
def test_signals_of_one_request_are_one(first, second, seconds_between):
    before, stop = signal.signal(signal.SIGHUP, signal.SIG_DFL), Stop()
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        os.kill(os.getpid(), first)
        time.sleep(seconds_between)
        os.kill(os.getpid(), second)
    with stop.handled(), pytest.raises(KeyboardInterrupt):
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, before)
    assert stop.signal is first and stop.status == 128 + first


def test_a_second_signal_that_arrives_during_a_long_operation_of_c_is_of_the_same_request():
    """No handler runs while C computes: what `timeout` sends second would be handled when it is done."""
    stop, long_string = Stop(), "x" * 2 * 10**8
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.005)
            os.kill(os.getppid(), signal.SIGTERM)
            os._exit(0)
        until = time.monotonic() + 5.0
        while stop.signal is None and time.monotonic() < until:
            pass
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            long_string.count("xy")
        os.waitpid(pid, 0)
    assert stop.signal is signal.SIGTERM


def test_before_the_first_step_a_doubled_signal_neither_exits_nor_interrupts_what_is_put_back():
    stop = Stop()
    with stop.handled():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.status == 143


@pytest.mark.parametrize(("saves", "seconds"), [(True, 21.0), (False, 22.0)])
def test_the_log_promises_a_checkpoint_only_where_the_run_saves_one(saves, seconds, caplog):
    def own_messages() -> list[str]:  # the thread of an earlier test may log during this one
        return [message for message in caplog.messages if f"within {seconds:g} s" in message]

    stop = Stop()
    with stop.handled(), stop.gracefully(seconds, in_process=True, saves=saves):
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 10.0
        while not own_messages() and time.monotonic() < until:
            time.sleep(0.01)
    work = "finishing or abandoning the current step, then saving a checkpoint," if saves else "stopping"
    assert own_messages() == [
        f"SIGTERM: {work} within {seconds:g} s (trainer.stop_seconds); a second signal stops immediately."
    ]


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop()
    try:
        with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.signal is None
