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


def test_work_that_would_not_end_in_time_is_left_at_once():
    assert stopped_in(Stop(), changing=False, usual=100.0, seconds=25.0, takes=9.0) < 2.0


def test_work_that_ends_in_time_is_finished():
    with pytest.raises(TimeoutError):
        stopped_in(Stop(), changing=False, usual=0.5, seconds=25.0, takes=0.5)


def test_work_that_has_begun_to_change_something_is_finished():
    with pytest.raises(TimeoutError):
        stopped_in(Stop(), changing=True, usual=100.0, seconds=25.0, takes=0.5)


def test_work_that_changes_something_is_left_when_time_is_up():
    assert 1.0 < stopped_in(Stop(), changing=True, usual=100.0, seconds=2.0, takes=9.0) < 6.0


def test_work_of_which_nothing_is_known_gets_half_of_the_time():
    assert 0.5 < stopped_in(Stop(), changing=False, usual=None, seconds=2.0, takes=9.0) < 5.0


def test_a_checkpoint_is_given_the_time_that_the_last_one_took():
    stop = Stop()
    stop.save_seconds = 8.0
    assert stopped_in(stop, changing=False, usual=1.0, seconds=10.0, takes=9.0) < 2.0


def test_a_change_under_way_is_finished_where_a_checkpoint_still_fits_behind_it():
    stop = Stop()
    stop.save_seconds = 8.0
    assert 1.9 < stopped_in(stop, changing=True, usual=100.0, seconds=10.0, takes=9.0) < 5.0


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
    "sent",
    [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP), (signal.SIGTERM, signal.SIGTERM)],
    ids=["terminal and shell", "systemd", "timeout"],
)
@pytest.mark.parametrize("seconds_between", [0.0, 0.02, 0.3])
def test_signals_of_one_request_are_one(sent, seconds_between):
    first, second = sent
    before, stop = signal.signal(signal.SIGHUP, signal.SIG_DFL), Stop()
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        os.kill(os.getpid(), first)
        time.sleep(seconds_between)
        os.kill(os.getpid(), second)
    with stop.handled(), pytest.raises(KeyboardInterrupt):
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, before)
    assert stop.signal is first


def test_a_hangup_is_no_second_request_however_late_it_comes():
    before, stop = signal.signal(signal.SIGHUP, signal.SIG_DFL), Stop()
    with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert stop.signal is signal.SIGTERM


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


def test_before_the_first_step_the_first_signal_raises():
    stop = Stop()
    with stop.handled(), pytest.raises(KeyboardInterrupt):
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
    saving = ", then saving a checkpoint" if saves else ""
    assert own_messages() == [
        f"SIGTERM: finishing or abandoning the current step{saving}, within {seconds:g} s (trainer.stop_seconds);"
        " a second signal stops at once."
    ]


def test_a_closed_terminal_asks_for_a_stop_as_sigterm_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    stop = Stop()
    try:
        with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.signal is signal.SIGHUP
    assert stop.status == 129


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
