"""The stage of episodes in processes of their own."""

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.interface import Finished, Reply, Start
from hybridflow.environments.process_stage import ProcessStage
from tests.unit.environments.players import FILE, Player, prompts_of


@pytest.mark.parametrize("removes", [False, True])
def test_an_environment_without_a_standard_output_keeps_its_episode(tokenizer, removes):
    name = f"{FILE.with_name('raising_environments.py')}:Silent"
    settings = {"processes": 1, "retries": 0, "max_turn_tokens": 6, "settings": {"removes": removes}}
    with Player(tokenizer, name, **settings) as player:
        found = player.play(prompts_of(tokenizer, ["12+34="]))
    assert found.object("episode_return") == [4.0]


def test_the_start_of_processes_is_logged_once_with_their_number(caplog):
    config = EnvironmentSettings(name=f"{FILE}:forking")
    stage = ProcessStage(config, 3, None)
    reply = Reply("fine", {"role": "assistant", "content": "fine"})
    try:
        with caplog.at_level("INFO", "hybridflow"):
            for numbers in ((0, 1), (2,)):
                running = set(numbers)
                stage.send({number: Start({"prompt": "1+1=", "forks": False}, seed=0) for number in numbers})
                while running:
                    events = stage.receive(seconds=60)
                    running -= {number for number, event in events.items() if isinstance(event, Finished)}
                    stage.send({number: reply for number in events if number in running})
    finally:
        stage.close()
    (line,) = (record.getMessage() for record in caplog.records if "processes" in record.getMessage())
    assert line.startswith(f"{config.chosen}: starting 2 processes, ") and "environment.processes=3" in line
