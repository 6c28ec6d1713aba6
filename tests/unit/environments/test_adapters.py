"""Environments and tools in the forms of other systems, recognized by their methods."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import Ask, Failed, Finished, Model, Reply, Start
from hybridflow.environments.loading import load_environment
from hybridflow.errors import ConfigError
from tests.unit.environments import foreign_verifiers
from tests.unit.environments.played import FOREIGN, Played, call
from tests.unit.environments.players import Parrot, conversations

SCHEMA = {
    "type": "function",
    "function": {
        "name": "grade",
        "description": "Grades an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
}


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("Corridor", "an environment in the form of Gymnasium or GEM", {}),
        ("OldCorridor", "an environment in the form of Gymnasium or GEM", {}),
        ("make", "an environment in the form of Gymnasium or GEM", {"env_id": "corridor"}),
        ("Tries", "an environment of SkyRL-Gym", {}),
        ("Counter", "an environment of TRL (environment_factory)", {}),
        ("AsyncCounter", "an environment of TRL (environment_factory)", {}),
        ("TOOLS", "tools (1)", {}),
        ("Duel", "a game of TextArena", {}),
        ("GradesAnswers", "a tool of verl (BaseTool)", {}),
    ],
)
def test_the_kind_is_recognized(name, kind, settings):
    found = load_environment(EnvironmentSettings(name=f"{FOREIGN}:{name}", settings=settings))
    assert (found.kind, found.is_trusted) == (kind, False)


@pytest.mark.parametrize("name", ["Echo", "Once", "AsyncEcho", "Adds"])
def test_environments_of_hybridflow_are_not_taken_for_others(name):
    found = load_environment(EnvironmentSettings(name=f"{FOREIGN.with_name('toy_environments.py')}:{name}"))
    assert found.kind is None


@pytest.mark.parametrize(
    ("name", "settings", "found"),
    [
        ("make", {}, "does not give it: env_id"),
        ("make", {"env_id": "unknown"}, "KeyError"),
        ("make", {"env_id": "nothing"}, "returns a SimpleNamespace"),
        ("UNTYPED_TOOLS", {}, "cannot be described to the model"),
        ("NO_TOOLS", {}, "is an empty list"),
    ],
)
def test_what_cannot_be_run_is_an_error_with_a_remedy(name, settings, found):
    with pytest.raises(ConfigError) as error:
        load_environment(EnvironmentSettings(name=f"{FOREIGN}:{name}", settings=settings))
    assert found in error.value.message and error.value.remedy


@pytest.mark.parametrize(
    ("name", "settings", "first"),
    [
        ("Corridor", {"length": 2}, "seed 7: go"),
        ("OldCorridor", {}, "seed None: go"),
        ("make", {"env_id": "corridor"}, "seed 7: go"),
    ],
)
def test_gymnasium_and_gem(capsys, name, settings, first):
    found = Played(name, ["a", "b"], seed=7, settings=settings)
    assert found.finished == Finished([0.5, 0.5], {"place": 2})
    assert found.shown(0) == [first] and found.shown(1) == [first, "a", "at 1"]
    assert capsys.readouterr().out == "closed\n"


def test_skyrl_gym():
    found = Played("Tries", ["5", "24"], answer="24", settings={"tries": 3})
    assert found.finished == Finished([0.0, 1.0], {"left": 1})
    assert found.shown(1) == ["Begin. Try!", "5", "Again."]
    assert Played("Tries", ["5", "6"], answer="24", settings={"tries": 2}).finished.rewards == [0.0, 0.0]


@pytest.mark.parametrize("name", ["Counter", "AsyncCounter"])
def test_trl_environments(name):
    found = Played(
        name, [call("increment", by=2), call("increment", by="x"), call("increment", by=3), "done"], answer="5"
    )
    assert found.finished.rewards == [0.0, 0.0, 0.0, 1.0]
    mistake = "Error: increment: by='x' is not of type int."
    assert found.shown(3)[::2] == ["Begin. Count to 5.", "2", mistake, "5"]
    (tool,) = found.asked[0].tools
    assert tool["function"]["name"] == "increment"
    assert Played(name, ["I will not"], answer="5").finished.rewards == [0.0]


def test_the_reward_of_trl_counts_at_a_limit_too():
    assert Played("Counter", [call("increment", by=5)], answer="5").finished.rewards == [1.0]
    text = Played("Counter", ["done"], answer="0", prompt="Begin.")
    assert text.finished.rewards == [1.0] and text.shown(0) == ["Begin. Count to 0."]


def test_a_reset_of_trl_that_returns_messages_is_an_error():
    ended = Played("Chats", ["done"]).ended
    assert isinstance(ended, Failed) and "'reset' returned [{'role': 'user', 'content': 'Go.'}]" in ended.reason
    assert "of type list, not text or None" in ended.reason


def test_a_list_of_tools():
    found = Played("TOOLS", [call("add", first=12, second=12), "24"])
    assert found.finished.rewards == [0.0, 0.0] and found.shown(1)[-1] == "24"


@pytest.mark.parametrize(("seed", "reward"), [(0, -1.0), (1, 1.0)])
@pytest.mark.parametrize(("name", "settings"), [("Duel", {}), ("make_game", {"env_id": "duel"})])
def test_textarena_in_self_play(name, settings, seed, reward):
    found = Played(name, ["3", "8"], seed=seed, settings={"num_players": 2, **settings})
    assert found.finished.rewards[-1] == reward and found.finished.info["seat"] == seed
    assert [ask.is_trained for ask in found.asked] == [seed == 0, seed == 1]
    assert found.shown(0) == ["Name a number.\n[Player 1] (hidden)"]


def test_textarena_shows_only_what_is_new_and_refuses_a_reward_that_is_text():
    found = Played("Repeats", ["1", "2"])
    assert found.finished.rewards == [0.0, 0.25]
    assert found.shown(1) == ["Guess.", "1", "1 is wrong."]
    failed = Played("Repeats", ["1", "fail"]).ended
    assert isinstance(failed, Failed) and "'failed'" in failed.reason


@pytest.mark.parametrize(("name", "text"), [("News", "Guess again."), ("Board", "The board has not changed.")])
def test_textarena_shows_what_happens_again(name, text):
    assert Played(name, ["1", "2"]).last_shown == [text, text]


@pytest.mark.parametrize(
    ("reward", "info", "known"), [(np.float32(0.5), None, {}), (np.int64(2), [1], {}), (1, {"rank": 1}, {"rank": 1})]
)
def test_textarena_may_give_numbers_of_numpy_and_no_information(reward, info, known):
    found = Played("Scores", ["3", "8"], settings={"num_players": 2, "reward": reward, "info": info})
    assert found.finished == Finished([float(reward)], {"seat": 0, **known})


@pytest.mark.parametrize("replies", [["3"], ["3", "raise"], ["3", "8"]])
def test_a_game_of_textarena_is_closed_once_however_it_ends(capsys, replies):
    ended = Played("Scores", replies, settings={"num_players": 2}).ended
    assert capsys.readouterr().out == "closed\n"
    if "raise" in replies:
        assert isinstance(ended, Failed) and "ValueError: no such number" in ended.reason
    else:
        assert isinstance(ended, Finished) and ended.info.get("over") == (None if len(replies) == 2 else "max_turns")


def test_opponents_that_share_a_transcript_do_not_end_a_game_of_three_early():
    prompts = conversations(["Play."])
    settings = {"name": f"{FOREIGN}:Trio", "processes": 0, "settings": {"num_players": 3}, "max_turns": 18}
    found = Parrot("qwen2_5").play(prompts, **settings, max_turn_tokens=9)
    assert found.row("turns").tolist() == [18.0] and not found.row("truncated").any()
    assert found.meta["environment/limited/max_response_tokens"] == 0.0


def test_verl_tools():
    settings = {"config": {"penalty": -0.05}, "tool_schema": SCHEMA}
    row = {"tools_kwargs": {"grade": {"create_kwargs": {"ground_truth": "24"}}}}
    found = Played(
        "GradesAnswers", [call("grade", answer="5"), call("grade", answer="24"), "24"], settings=settings, **row
    )
    assert found.finished.rewards == [-0.05, -0.05, 1.0]
    assert found.shown(2)[2::2] == ["reward 0.0", "reward 1.0"]
    nested = Played("GradesAnswers", [call("grade", answer="24")], settings=settings, extra_info=row)
    assert nested.finished.rewards == [0.95]


@pytest.fixture
def stand_in(monkeypatch):
    """The package of verifiers, as the file below has it."""
    for name in ("verifiers.v1", "verifiers.v1.utils.generic"):
        monkeypatch.setitem(sys.modules, name, foreign_verifiers)


SUMS = f"{Path(foreign_verifiers.__file__)}:Sums"


@pytest.mark.parametrize(("reply", "reward"), [("4", 1.0), ("5", 0.0)])
def test_a_task_set_of_verifiers(stand_in, reply, reward):
    found = Played(SUMS, [reply], task=2, settings={"agent": {"max_turns": 1}})
    assert found.finished.rewards == [reward] and found.shown(0) == ["2+2="]
    assert found.finished.info == {"asked": 1.0, "correct": reward}


@pytest.mark.parametrize(
    ("task", "settings", "replies", "says"),
    [
        (None, {}, [], "the task None"),
        (3, {}, [], "the task set has 3 tasks"),
        (1, {"agent": {"max_turns": 0}}, [], "without a reply of the model"),
        (1, {"agent": {"max_turns": 1, "retries": {}}}, [], "has retries, which the run decides"),
        (1, {"taskset": {"highest": 99}}, [], "has tool servers that all tasks share"),
        (1, {}, ["TaskError"], "its agent failed: TaskError: gone"),
        (1, {}, ["late"], "its task has no correct: it stopped: scoring_timeout"),
    ],
)
def test_a_task_of_verifiers_that_cannot_be_played_says_why(stand_in, task, settings, replies, says):
    ended = Played(SUMS, replies, task=task, settings={"agent": {"max_turns": 1}} | settings).ended
    assert isinstance(ended, Failed) and says in ended.reason and not ended.is_infrastructure


def test_what_interrupts_an_agent_of_verifiers_or_its_task_set_is_tried_again(stand_in):
    settings = {"agent": {"max_turns": 1}}
    ended = Played(SUMS, ["SandboxError"], task=1, settings=settings).ended
    assert isinstance(ended, Failed) and ended.is_infrastructure and "gone" in ended.reason
    config = EnvironmentSettings(name=SUMS, settings=settings | {"taskset": {"highest": 7}})
    environment = load_environment(config)

    def played() -> Finished | Failed:
        async def exchange(ask: Ask) -> Reply:
            return Reply("12", {"role": "assistant", "content": "12"})

        row = {"prompt": [{"role": "user", "content": "Begin."}], "task": 6}
        return asyncio.run(run_episode(environment, config, Start(row, 0), Model(exchange)))

    first, second = played(), played()
    assert isinstance(first, Failed) and first.is_infrastructure
    assert isinstance(second, Finished) and second.rewards == [1.0]


def test_a_setting_that_a_task_set_of_verifiers_lacks_is_refused_before_the_run(stand_in):
    with pytest.raises(ConfigError, match="no setting 'tasksets'") as error:
        load_environment(EnvironmentSettings(name=SUMS, settings={"tasksets": {}}))
    assert "taskset" in error.value.remedy


def test_an_agent_of_verifiers_that_fails_at_a_limit_gets_no_reward(stand_in):
    found = Played(SUMS, [], task=0, settings={"agent": {"max_turns": 1}})
    assert found.finished.info == {"over": "max_turns"}
