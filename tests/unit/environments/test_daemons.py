"""Daemons that environments and programs start end with the process of the episode."""

import sys

import psutil
import pytest

from hybridflow.errors import EpisodeError
from tests.unit.environments.players import Player, prompts_of
from tests.unit.environments.test_program import program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreapers")


def daemon_of(file):
    """The daemon that wrote its process id to a file; None if it has ended."""
    number = int(file.read_text())
    return psutil.Process(number) if psutil.pid_exists(number) else None


def has_ended(daemon):
    return daemon is None or not psutil.wait_procs([daemon], timeout=10)[1]


def test_the_daemon_of_an_environment_ends_with_its_process(tokenizer, tmp_path):
    settings = {"processes": 1, "max_turn_tokens": 6, "settings": {"file": str(tmp_path / "pid")}}
    with Player(tokenizer, "Daemonizes", **settings) as player:
        player.play(prompts_of(tokenizer, ["12+34="]))
        daemon = daemon_of(tmp_path / "pid")
        assert daemon is not None and daemon.is_running()
    assert has_ended(daemon)


def test_the_daemon_of_an_environment_that_exits_is_ended_before_the_next_one_starts(tokenizer, tmp_path):
    own = {"file": str(tmp_path / "pid"), "exits": True}
    settings = {"processes": 1, "max_turn_tokens": 6, "retries": 0, "settings": own}
    with Player(tokenizer, "Daemonizes", **settings) as player:
        with pytest.raises(EpisodeError, match="exited with status 5"):
            player.play(prompts_of(tokenizer, ["12+34="]))
        assert has_ended(daemon_of(tmp_path / "pid"))


def test_the_daemon_of_a_program_ends_with_the_process_that_ran_it(tokenizer, tmp_path):
    settings = {"processes": 1, "max_turn_tokens": 6}
    with Player(tokenizer, program=program("daemonizes", tmp_path / "pid"), **settings) as player:
        player.play(prompts_of(tokenizer, ["12+34="]))
        daemon = daemon_of(tmp_path / "pid")
        assert daemon is not None and daemon.is_running()
    assert has_ended(daemon)
