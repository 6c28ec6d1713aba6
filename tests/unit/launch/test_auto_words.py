"""Words that leave a placement, a layout or a number of devices to hybridflow."""

import pytest

from hybridflow.config.experiment import Experiment
from hybridflow.config.placement import ParallelismKind, PlacementKind
from hybridflow.errors import ConfigError
from hybridflow.launch.automatic import plan_fully
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.compose.overrides import given_settings, parse_overrides
from hybridflow.launch.compose.run_files import with_files
from hybridflow.launch.plan.defaults import with_values
from hybridflow.launch.plan.plan import plan_run

WORDS = ["placement=split", "actor.parallelism=auto", "rollout.parallelism=auto", "trainer.devices=auto"]


def composed(*overrides: str) -> Composed:
    return compose_run(parse_overrides(overrides), config_name="ppo")


def assert_as_said(config: Experiment) -> None:
    assert config.placement.kind is PlacementKind.split
    assert config.actor.parallelism.kind is config.rollout.parallelism.kind is ParallelismKind.auto
    assert config.critic.parallelism.kind is ParallelismKind.given
    assert config.trainer.devices == 0


def test_a_word_sets_the_kind_of_a_section_and_auto_a_number_on_the_command_line_in_files_and_in_python(tmp_path):
    assert_as_said(composed(*WORDS).config)
    pairs = dict(word.split("=") for word in WORDS)
    assert_as_said(compose_run(given_settings(pairs), config_name="ppo").config)
    file = tmp_path / "run.yaml"
    file.write_text("placement: split\nactor: {parallelism: auto}\nrollout.parallelism: auto\ntrainer.devices: auto\n")
    assert_as_said(compose_run(with_files([file], [], config_name="ppo"), config_name="ppo").config)


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("placement=splitt", "placement.kind=splitt is unknown", "Did you mean 'split'?"),
        ("actor.parallelism=all", "actor.parallelism.kind=all is unknown", "given, auto"),
        ("trainer.devices=all", "trainer.devices has the wrong type", "of 1 or more, or auto"),
        ("trainer.devices=-1", "trainer.devices=-1 is too small", "Use 1 or more, or auto."),
        ("trainer.nodes=auto", "trainer.nodes has the wrong type", "a whole number of 1 or more"),
    ],
)
def test_another_word_is_named_with_what_belongs_there(override, message, remedy):
    with pytest.raises(ConfigError) as found:
        composed(override)
    assert message in found.value.message
    assert remedy in (found.value.remedy or "")


def test_a_critic_whose_layout_is_planned_does_not_follow_the_actor():
    words = ["trainer.devices=2", "trainer.device=cpu", "actor.engine=megatron", "actor.parallelism.tensor=2"]
    origins = plan_fully(composed(*words, "critic.parallelism=auto")).composed.origins
    assert origins["critic.engine"] == "plan"
    assert origins["actor.engine"] == "command line"
    given = plan_fully(composed(*words, "critic.parallelism=auto", "critic.parallelism.tensor=2"))
    assert given.config.critic.parallelism.tensor == 2


def test_the_number_of_concurrent_responses_that_a_user_sets_is_kept():
    plan = plan_fully(composed("rollout.parallelism=auto", "rollout.max_sequences=4", "trainer.device=cpu"))
    assert plan.config.rollout.max_sequences == 4


def test_pools_of_the_user_and_a_placement_that_is_chosen_are_an_error():
    with pytest.raises(ConfigError, match=r"placement=split.*placement\.pools\.a\.devices.*Leave out"):
        plan_fully(composed("placement=split", "placement.pools.a.devices=1", "trainer.device=cpu"))


def test_without_a_cluster_a_cpu_is_one_device_and_a_record_asks_again(tmp_path):
    plan = plan_run(composed("trainer.devices=auto", "trainer.device=cpu"))
    assert (plan.config.trainer.devices, plan.pools) == (1, {"main": 1})
    record = tmp_path / "config.yaml"
    record.write_text(config_text(plan.composed))
    assert "devices: 1  # origin: auto" in record.read_text()
    again = compose_run(with_files([record], [], config_name="ppo"), config_name="ppo").config
    assert again.trainer.devices == 0


def test_what_was_planned_is_in_the_record_and_planned_again(tmp_path):
    planned = with_values(composed("placement=split"), {"actor.parallelism.tensor": 2}, "plan")
    record = tmp_path / "config.yaml"
    record.write_text(config_text(planned))
    assert "tensor: 2  # origin: plan" in record.read_text()
    again = compose_run(with_files([record], [], config_name="ppo"), config_name="ppo").config
    assert again.placement.kind is PlacementKind.split
    assert again.actor.parallelism.tensor == 1
