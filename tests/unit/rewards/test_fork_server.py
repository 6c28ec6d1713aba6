"""The pool after the death of its fork server, and after an interruption: clear errors, and right scores afterwards."""

import signal
import sys

import psutil
import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import ProcessKilled
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.pooled import PooledRunner

JUDGES = """
import os, signal, time

def kill_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

def acts(completions, **columns):
    acts = {"kill server": kill_server, "nap": lambda: time.sleep(2)}
    for text in completions:
        acts.get(text, int)()
    return [1.0] * len(completions)

def lengths(completions, **columns):
    return [float(len(text)) for text in completions]
"""
DIED = "The fork server of the reward functions was killed by signal"


@pytest.fixture
def judges(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    return Reward(functions=[f"{tmp_path}/judges.py:{name}" for name in ("acts", "lengths")])


def samples_of(*texts):
    return Samples([f"p{index}" for index in range(len(texts))], [*texts], {})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, processes outlive their server")
@pytest.mark.parametrize(
    ("how", "remedy"), [(signal.SIGKILL, "when memory runs out"), (signal.SIGSEGV, "Find out what sent the signal")]
)
def test_the_death_of_an_idle_fork_server_is_named_and_the_next_run_starts_another(judges, how, remedy):
    before = psutil.Process().children()
    runner, functions = PooledRunner(judges, processes=1), resolve_functions(judges)
    runner.run(functions, samples_of("a", "b"), allowed_failures=0)
    [server] = set(psutil.Process().children()) - set(before)
    processes = server.children()
    server.send_signal(how)
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert (len(gone), alive) == (1, [])
    with pytest.raises(ProcessKilled, match=f"{DIED} {int(how)}") as caught:
        runner.run(functions, samples_of("a", "b"), allowed_failures=0)
    assert remedy in caught.value.remedy
    assert runner.run(functions, samples_of("a"), allowed_failures=0)[0].scores == [1.0]


def test_the_death_of_the_fork_server_while_functions_run_is_named_and_the_next_run_starts_another(judges):
    runner, functions = PooledRunner(judges, processes=3), resolve_functions(judges)
    for _ in range(2):
        with pytest.raises(ProcessKilled, match=f"{DIED} 9"):
            runner.run(functions, samples_of("a", "kill server", "b", "kill server", "c"), allowed_failures=0)
    assert runner.run(functions, samples_of("a", "b"), allowed_failures=0)[0].scores == [1.0, 1.0]


def test_replies_to_a_run_that_was_interrupted_are_not_taken_for_those_of_the_next(judges):
    runner, functions = PooledRunner(judges, processes=2), resolve_functions(judges)
    before = signal.signal(signal.SIGALRM, lambda *_: 1 // 0)
    try:
        runner.run(functions, samples_of("a"), allowed_failures=0)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(ZeroDivisionError):
            runner.run(functions, samples_of("nap"), allowed_failures=0)
    finally:
        signal.signal(signal.SIGALRM, before)
    found = runner.run(functions[1:], samples_of("three"), allowed_failures=0)
    assert [outcome.scores for outcome in found] == [[5.0]]
