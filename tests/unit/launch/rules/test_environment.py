"""Runs with an environment that cannot work, or in which it has no effect."""

import logging
from pathlib import Path

import pytest

from hybridflow.launch.rules.environment import environment_problems
from tests.unit.launch.plans import errors, judged, planned

DISCOUNTED = ("environment.credit=return_to_go", "algorithm.gamma=0.9")
ENVIRONMENTS = Path(__file__).parents[2] / "environments"
RUN = ("environment=guess_number", "reward.functions=environment", "trainer.total_steps=1")


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (("environment=guess_numbers",), "no built-in environment", "guess_number"),
        (("environment=my.py:Maze",), "there is no file", "Name a file"),
        (("environment.settings={lowest: 1}",), "has no setting 'lowest'", "highest"),
        (("environment.max_turn_tokens=9", "data.max_response_tokens=8"), "a whole episode", "max_response_tokens"),
        (("algorithm=grpo", "environment.credit=turn"), "reads only the return", "credit=outcome"),
        (("algorithm=grpo", "environment.credit=return_to_go"), "reads only the return", "credit=outcome"),
        (
            ("dataflow=generate", "dataflow_settings.out=o.jsonl", "trainer.total_steps=0"),
            "one reply to each prompt",
            "hybridflow evaluate",
        ),
        (("environment.name=null",), "the run has no environment", "environment=NAME"),
    ],
)
def test_what_cannot_work_is_an_error(words, found, remedy):
    (error,) = errors(planned(*RUN, *words), environment_problems)
    assert found in error.message and remedy in error.remedy


def test_rewards_that_are_not_used_are_named():
    (advice,) = judged(planned(*RUN, "reward.functions=exact_match"), environment_problems)
    assert "are not used" in advice.message and "reward.functions" in advice.remedy


def test_tools_alone_are_scored_by_another_function(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "mine.py"
    file.write_text(
        'def add(a: int) -> int:\n    """Adds.\n\n    Args:\n        a: A number.\n    """\n\n\nTOOLS = [add]\n'
    )
    tools = f"environment={file}:TOOLS"
    assert judged(planned(*RUN, tools, "reward.functions=exact_match"), environment_problems) == []
    assert f"environment={file}:TOOLS kind='tools (1)'" in caplog.text
    (advice,) = judged(planned(*RUN, tools), environment_problems)
    assert "tools alone give no rewards" in advice.message and "another reward function" in advice.remedy


def test_a_budget_without_a_token_per_reply_is_named():
    words = ["data.max_response_tokens=4", "environment.max_turns=8"]
    (advice,) = judged(planned(*RUN, *words), environment_problems)
    assert "less than a token for each of the environment.max_turns=8 replies" in advice.message


def test_an_environment_without_samples_has_no_effect():
    plan = planned("environment=guess_number", "trainer.total_steps=1", name="sft")
    assert "has no effect" in judged(plan, environment_problems)[0].message


def test_a_sound_run_has_no_problems():
    assert judged(planned(*RUN, "environment.credit=turn"), environment_problems) == []
    assert judged(planned(*RUN, *DISCOUNTED), environment_problems) == []
    assert judged(planned("trainer.total_steps=1"), environment_problems) == []


def test_what_is_discounted_per_reply_is_not_discounted_per_token_again():
    for words, by_reply, by_token in (((), 0.9, 0.9), (("environment.credit=return_to_go",), 0.9, 1.0)):
        plan = planned(*RUN, "algorithm.gamma=0.9", *words)
        roles = {role.name: role.arguments for role in plan.roles}
        assert roles["actor"].rollout.gamma == by_reply
        assert roles["actor"].algorithm.gamma == roles["critic"].algorithm.gamma == by_token


@pytest.mark.parametrize(("name", "kind"), [("Tries", "an environment of SkyRL-Gym"), ("Once", None)])
def test_the_log_says_once_what_was_recognized(caplog, name, kind):
    file = ENVIRONMENTS / ("foreign_environments.py" if kind else "toy_environments.py")
    with caplog.at_level(logging.INFO):
        judged(planned(f"environment={file}:{name}", *RUN[1:]), environment_problems)
    logged = [record.getMessage() for record in caplog.records if "kind=" in record.getMessage()]
    assert logged == ([f"environment={file}:{name} kind='{kind}'"] if kind else [])
