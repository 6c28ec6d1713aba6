"""The command line to a checked, sealed configuration."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.config.directory import config_directory
from hybridflow.config.roles import RoleKind
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.command_line import parse_command_line
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.files import read_files
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.compose.overrides import parse_overrides
from hybridflow.launch.compose.presets import SYNONYMS, preset_name
from hybridflow.launch.compose.trainers import TrainingCommand
from hybridflow.launch.plan.dataflow import DATAFLOWS
from hybridflow.launch.plan.defaults import with_device_defaults
from hybridflow.launch.rules.algorithm import minibatch_advice
from tests.unit.launch.plans import judged, planned


def compose(*overrides: str, name: str = "ppo", directory: Path | None = None) -> Composed:
    return compose_run(overrides, config_name=name, config_dir=directory)


MODEL = "model: {path: 'builtin:calculator'}\n"


def written(directory: Path, text: str) -> Path:
    (directory / "mine.yaml").write_text(text)
    return directory


def test_without_arguments_ppo_trains_the_calculator_and_the_configuration_is_sealed():
    config = compose().config
    assert (config.dataflow, config.algorithm.advantage) == ("ppo", "gae")
    assert config.model.path == "builtin:calculator"
    assert config.critic.optimizer.learning_rate > 0
    with pytest.raises(ConfigError, match="The configuration is frozen"):
        config.trainer.seed = 5


def test_a_group_changes_the_dataflow_and_its_numbers_and_every_origin_is_known():
    composed = compose("algorithm=grpo", "trainer.seed=0", "data.batch_size=128")
    assert (composed.config.dataflow, composed.config.algorithm.advantage) == ("grpo", "grpo")
    assert composed.config.rollout.samples_per_prompt > 1
    keys = ("trainer.seed", "data.batch_size", "rollout.samples_per_prompt", "algorithm.gamma")
    assert [composed.origins[key] for key in keys] == ["command line", "command line", "file", "default"]
    assert composed.origins.keys() == composed.flat().keys()


@pytest.mark.parametrize("synonym", SYNONYMS)
def test_an_algorithm_answers_to_its_other_names(synonym):
    named, canonical = compose(f"algorithm={synonym}"), compose(f"algorithm={preset_name(synonym)}")
    assert named.config == canonical.config
    assert named.origins == canonical.origins


def test_a_users_own_set_of_settings_comes_before_a_synonym(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/vanilla.yaml").write_text("# @package _global_\ntrainer: {seed: 7}\n")
    directory = written(tmp_path, "defaults: [experiment, _self_, {algorithm: ppo}, {task: calculator}]\n")
    assert compose("algorithm=vanilla", name="mine", directory=directory).config.trainer.seed == 7
    assert compose("algorithm=gae", name="mine", directory=directory).config.dataflow == "ppo"


def test_every_configuration_of_the_package_composes_and_each_trainer_has_a_directory():
    trainers = [path.stem for path in sorted(config_directory().glob("*.yaml"))]
    for settings in ([], ["model.path=mine", "data.train_files=[a.jsonl]"]):
        assert len({compose(*settings, name=name).config.trainer.experiment for name in trainers}) == len(trainers) == 5
    for path in sorted(config_directory().glob("algorithm/*.yaml")):
        assert compose(f"algorithm={path.stem}").config.dataflow in DATAFLOWS


def test_configurations_from_the_same_files_do_not_share_memory():
    first, second = (read_files("ppo", config_directory(), parse_overrides([]), {})[0] for _ in range(2))
    first.trainer.seed += 1
    assert second.trainer.seed + 1 == first.trainer.seed


@pytest.mark.parametrize(
    ("placement", "estimator", "origin"),
    [("none", None, "default"), ("loss", "k3+", "algorithm.kl.placement"), ("reward", "k1", "algorithm.kl.placement")],
)
def test_the_estimator_that_the_placement_of_the_divergence_implies_is_written_down(placement, estimator, origin):
    composed = compose("algorithm=grpo", f"algorithm.kl.placement={placement}")
    assert composed.flat()["algorithm.kl.estimator"] == estimator
    assert composed.origins["algorithm.kl.estimator"] == origin
    typed = compose("algorithm=grpo", f"algorithm.kl.placement={placement}", "algorithm.kl.estimator=k2")
    assert typed.flat()["algorithm.kl.estimator"] == "k2"


def test_rows_of_tables_are_made_when_named_and_keep_their_defaults(tmp_path):
    typed = ["trainer.devices=2", "placement.pools.a.devices=1", "placement.pools.b.devices=1"]
    typed += ["placement.roles.critic=b", "dataflow_settings.limit=3"]
    composed = compose(*typed, "roles.judge.kind=reward_function", "roles.judge.functions=exact_match")
    config, origins, judge = composed.config, composed.origins, composed.config.roles["judge"]
    assert {name: pool.devices for name, pool in config.placement.pools.items()} == {"a": 1, "b": 1}
    assert (config.placement.roles, config.dataflow_settings) == ({"critic": "b"}, {"limit": 3})
    assert (judge.kind, judge.functions, judge.pool) == (RoleKind.reward_function, ["exact_match"], None)
    assert (origins["roles.judge.kind"], origins["roles.judge.pool"]) == ("command line", "default")
    text = "defaults: [experiment, {task: calculator}, _self_]\n"
    text += "roles: {judge: {pool: main}}\nplacement: {pools: {main: {devices: 1}}}\n"
    assert compose(name="mine", directory=written(tmp_path, text)).config.roles["judge"].pool == "main"


@pytest.mark.parametrize(("written_as", "is_on"), [("true", True), ("yes", True), ("off", False)])
def test_a_switch_is_on_or_off_as_yaml_writes_it(tmp_path, written_as, is_on):
    assert compose(f"data.shuffle={written_as}").config.data.shuffle is is_on
    directory = written(
        tmp_path, f"defaults: [experiment, _self_]\ndata: {{shuffle: {written_as}, train_files: [a.jsonl]}}\n{MODEL}"
    )
    assert compose(name="mine", directory=directory).config.data.shuffle is is_on


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("trainer.seed=abc", "trainer.seed has the wrong type: Value 'abc'", "takes a whole number"),
        ("trainer.seed=null", "trainer.seed cannot be null", ""),
        ("data.shuffle=perhaps", "data.shuffle has the wrong type", "takes true or false"),
        ("model.trust_remote_code=2", "model.trust_remote_code=2 has the wrong type", "takes true or false"),
        ("roles.judge={process: 1}", "roles.judge.process=1 has the wrong type", "takes true or false"),
        ("trainer.backend=locl", "trainer.backend=locl is unknown", "'local'? trainer.backend must be one of: auto"),
        ("model.dtype=5", "model.dtype=5 is unknown", "model.dtype must be one of: "),
        ("algorithm.advantage=gea", "algorithm.advantage=gea is unknown", "Did you mean 'gae'?"),
        ("algorithm.preference.loss=sigmiod", "loss=sigmiod is unknown", "Did you mean 'sigmoid'?"),
        ("roles.judge.kind=judge", "roles.judge.kind=judge is unknown", "must be one of: reference, reward_function"),
        ("reward.weights=[heavy]", "reward.weights has the wrong type", "takes a list, each a number"),
        ("trainer.seed=${trainer.sed}", "trainer.seed cannot be set: Interpolation key", "takes a whole number"),
        ("algorithm=pppo", "There is no algorithm=pppo", "Did you mean 'ppo'? Choose from: "),
        ("algorithm=dpo", "There is no algorithm=dpo", "It has its own trainer: hybridflow dpo."),
        ("algorithm=simpo", "There is no algorithm=simpo", "hybridflow simpo."),
    ],
)
def test_a_wrong_value_is_named_with_what_belongs_there(override, message, remedy):
    with pytest.raises(ConfigError) as caught:
        compose(override)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_a_users_file_may_choose_the_packages_groups(tmp_path):
    text = "defaults: [experiment, {algorithm: grpo}, {task: calculator}, _self_]\nrollout: {samples_per_prompt: 3}\n"
    composed = compose(name="mine", directory=written(tmp_path, text))
    assert composed.config.rollout.samples_per_prompt == 3
    assert composed.origins["rollout.samples_per_prompt"] == "file"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("defaults: [experiment, _self_]\ntrainer: {sed: 3}", "no setting 'trainer.sed'", "Did you mean trainer.seed?"),
        ("defaults: [experiment, _self_]\ntrainer: {seed: x}", "trainer.seed has the wrong type", "a whole number"),
        ("defaults: [experiment, _self_]\nroles: {j: {knd: x}}", "no setting 'roles.j.knd'", "roles.j.kind"),
        ("defaults: [experimnt, _self_]", "builds on 'experimnt', which does not exist", "experiment"),
        ("defaults: [experiment, _self_, {algorithm: pppo}]", "There is no algorithm=pppo", "Did you mean 'ppo'?"),
        ("defaults: [experiment, _self_, {algorithm: vanilla}]", "no algorithm=vanilla", "It is called ppo here."),
        ("defaults: [experiment, _self_]\ndata: {shuffle: -5}", "data.shuffle=-5 has the wrong type", "true or false"),
        ("defaults: [experiment\ntrainer: {seed: 3}", "mine.yaml", "--help"),
        ("[1, 2]", "mine.yaml", "--help"),
        ("defaults: [experiment, part, _self_]", "part.yaml must hold settings by name", "name: value"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong_in_it(tmp_path, text, message, remedy):
    (tmp_path / "part.yaml").write_text("[1]")
    with pytest.raises(ConfigError) as caught:
        compose(name="mine", directory=written(tmp_path, text))
    assert message in caught.value.message and remedy in caught.value.remedy


def test_the_record_of_a_run_is_a_configuration_whose_values_nobody_is_said_to_have_set(tmp_path):
    composed = compose("algorithm=safe_rlhf", "data.batch_size=64")
    again = compose("trainer.seed=4", name="mine", directory=written(tmp_path, config_text(composed)))
    assert {**again.flat(), "trainer.seed": 0} == {**composed.flat(), "trainer.seed": 0}
    assert again.user_keys == {"trainer.seed"}


def test_a_part_of_a_users_file_may_stand_in_any_section_and_a_row_may_keep_all_defaults(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/part.yaml").write_text("epochs: 5\n")
    text = "defaults: [ppo, {algorithm@critic: part}, _self_]\nplacement: {pools: {a: {}}}\n"
    composed = compose(name="mine", directory=written(tmp_path, text))
    assert (composed.config.critic.epochs, composed.config.placement.pools["a"].devices) == (5, 1)
    assert "critic.epochs" in composed.user_keys


def test_a_configuration_or_group_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no sftt\.yaml") as caught:
        compose(name="sftt")
    assert {"ppo", "sft"} <= set(caught.value.remedy.removesuffix(".").partition(": ")[2].split(", "))
    with pytest.raises(ConfigError, match=r"has no effect with sft\.yaml") as caught:
        compose("algorithm=ppo", name="sft")
    assert "Leave it out" in caught.value.remedy


TYPED = ("model.path=some/model", "data.train_files=some.jsonl")
IN_FILE = "model: {path: some/model}\ndata: {train_files: [some.jsonl]}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "has_those_of_the_task"),
    [
        ("defaults: [ppo, _self_]\n", (), True),
        ("defaults: [ppo, _self_]\n", TYPED, False),
        ("defaults: [ppo, _self_]\n", (*TYPED, "task=calculator"), True),
        (f"defaults: [ppo, _self_]\n{IN_FILE}", (), False),
        (f"defaults: [ppo, _self_]\n{IN_FILE}", ("task=calculator",), True),
        (f"defaults: [experiment, {{task: calculator}}, _self_]\n{IN_FILE}", (), True),
    ],
)
def test_a_model_of_ones_own_leaves_the_numbers_of_the_task_out(tmp_path, text, overrides, has_those_of_the_task):
    directory = written(tmp_path, text)
    configs = [compose(*overrides, name="mine", directory=directory).config]
    configs += [] if IN_FILE in text else [compose(*overrides).config]
    for config in configs:
        assert (config.actor.optimizer.learning_rate > 1e-5) is has_those_of_the_task


def test_composing_imports_neither_torch_nor_ray_and_works_from_any_directory(tmp_path):
    program = (
        "import sys; from hybridflow.launch.compose.compose import compose_run;"
        "compose_run(['algorithm=grpo', 'trainer.seed=3'], config_name='ppo');"
        "print([m for m in ('torch', 'ray', 'transformers', 'tensordict') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_options_and_settings_may_be_mixed():
    flags = parse_command_line(
        ["a=1", "--cfg", "job", "b=2", "-cn", "sft"], program="p", command=TrainingCommand("ppo")
    )
    assert (flags.overrides, flags.cfg, flags.config_name, flags.help) == (["a=1", "b=2"], "job", "sft", False)


@pytest.mark.parametrize(
    ("argv", "message", "remedy"),
    [
        (["--dryrun"], "no option --dryrun", "Did you mean '--dry-run'?"),
        (["--job", "ray"], "no option --job", "Did you mean '--jobs'?"),
        (["--trainer.seed", "3"], "no option", "key=value, without dashes"),
        (["--cfg", "hydra"], "choice", "key=value, without dashes"),
        (["--config-name"], "argument", "key=value, without dashes"),
        (["--conf=x"], "option", "key=value, without dashes"),
        (["--num-generations=4"], "no option --num-generations=4", "use rollout.samples_per_prompt. Settings are"),
        (["--trainer.sed", "3"], "no option --trainer.sed", "Did you mean trainer.seed? Settings are"),
        (["--trainer.seed=3"], "no option --trainer.seed=3", "without dashes: trainer.seed=3;"),
    ],
)
def test_a_wrong_option_is_answered_with_the_setting_and_how_to_write_it(argv, message, remedy):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_command_line(argv, program="p", command=TrainingCommand("ppo"))
    assert remedy in caught.value.remedy and not re.search("num.generations=|sed=", caught.value.remedy)


@pytest.mark.parametrize(("batch_size", "minibatch"), [(4, 4), (48, 24), (64, 32), (100, 25), (7, 7)])
def test_the_presets_minibatch_follows_a_batch_size_that_is_typed_unless_it_is_typed_too(batch_size, minibatch):
    composed = compose(f"data.batch_size={batch_size}")
    assert composed.config.actor.minibatch_size == composed.config.critic.minibatch_size == minibatch
    assert composed.origins["actor.minibatch_size"] == ("file" if minibatch == 32 else "data.batch_size")
    assert compose(f"data.batch_size={batch_size}", "actor.minibatch_size=32").config.actor.minibatch_size == 32


def test_paths_are_absolute_in_the_configuration_and_as_written_where_they_are_recorded(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    composed = compose_run(["task=calculator", "model.path=model", "trainer.run_dir=out"], config_name="ppo")
    assert (composed.config.model.path, composed.config.trainer.run_dir) == (f"{tmp_path}/model", f"{tmp_path}/out")
    for recorded in (composed, with_device_defaults(composed, "cpu")):
        assert (recorded.flat()["model.path"], recorded.flat()["trainer.run_dir"]) == ("model", "out")


def test_minibatches_that_follow_are_warned_of_with_the_learning_rate_that_stays():
    assert not judged(planned("data.batch_size=64"), minibatch_advice)
    actor, critic = judged(planned("data.batch_size=8"), minibatch_advice)
    assert actor.message.startswith("actor.minibatch_size=8 was set to fit data.batch_size=8; actor.optimizer")
    assert critic.message.startswith("critic.minibatch_size=8 was set")
    assert len(judged(planned("algorithm=grpo", "data.batch_size=8"), minibatch_advice)) == 1


def test_objects_of_a_run_that_was_moved_are_found_through_the_checkpoint_to_resume_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = Path("inputs/0123456789ab/data.jsonl")
    moved, earlier = tmp_path / "moved" / stored, tmp_path / "runs/mine" / stored
    for file in (moved, earlier):
        file.parent.mkdir(parents=True)
        file.write_text('{"prompt": "1+1="}\n')
    words = [f"data.train_files=[runs/mine/{stored}]", "trainer.resume=moved/checkpoints/step_5"]
    assert compose(*words).config.data.train_files == [str(earlier)]
    earlier.unlink()
    assert compose(*words).config.data.train_files == [str(moved)]


def test_null_for_a_setting_that_has_no_null_says_how_to_return_to_its_default():
    with pytest.raises(ConfigError, match=r"placement\.pools cannot be null") as caught:
        planned("placement.pools=null")
    assert "For its default, leave it out." in caught.value.remedy
