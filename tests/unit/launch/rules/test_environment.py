"""Runs with an environment that cannot work, or in which it has no effect."""

import pytest

from hybridflow.launch.rules.environment import environment_problems
from hybridflow.launch.rules.unused_settings import unused_settings
from tests.unit.launch.plans import errors, judged, planned

DISCOUNTED = ("environment.credit=return_to_go", "environment.turn_gamma=0.9")
RUN = ("environment=guess_number", "reward.functions=environment", "trainer.total_steps=1")


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (("environment=guess_numbers",), "no built-in environment", "guess_number"),
        (("environment=my.py:Maze",), "there is no file", "Name a file"),
        (("environment.settings={lowest: 1}",), "has no setting 'lowest'", "highest"),
        (
            ("rollout.engine=vllm", "rollout.parallelism.tensor=2", "trainer.devices=2"),
            "its own episodes",
            "rollout.parallelism.tensor=1",
        ),
        (("environment.max_turn_tokens=9", "data.max_response_tokens=8"), "a whole episode", "max_response_tokens"),
        (("algorithm=grpo", "environment.credit=turn"), "reads only the return", "credit=outcome"),
        (("algorithm=grpo", "environment.credit=return_to_go"), "reads only the return", "credit=outcome"),
        (("environment.credit=return_to_go", "algorithm.gamma=0.9"), "per token as well", "environment.turn_gamma"),
        (("environment.name=null",), "the run has no environment", "environment=NAME"),
    ],
)
def test_what_cannot_work_is_an_error(words, found, remedy):
    (error,) = errors(planned(*RUN, *words), environment_problems)
    assert found in error.message and remedy in error.remedy


def test_rewards_that_are_not_used_are_named():
    (advice,) = judged(planned(*RUN, "reward.functions=exact_match"), environment_problems)
    assert "are not used" in advice.message and "reward.functions" in advice.remedy


def test_an_environment_without_samples_has_no_effect():
    plan = planned("environment=guess_number", "trainer.total_steps=1", name="sft")
    assert "has no effect" in judged(plan, environment_problems)[0].message


def test_a_sound_run_has_no_problems():
    assert judged(planned(*RUN, "environment.credit=turn"), environment_problems) == []
    assert judged(planned(*RUN, *DISCOUNTED), environment_problems) == []
    assert judged(planned("trainer.total_steps=1"), environment_problems) == []


def test_a_discount_that_nothing_reads_is_named():
    [advice] = judged(planned(*RUN, "environment.turn_gamma=0.9", "environment.credit=turn"), unused_settings)
    assert "environment.turn_gamma=0.9 has no effect: environment.credit=turn" in advice.message
    assert not judged(planned(*RUN, *DISCOUNTED), unused_settings)
