"""`--help` and `--cfg job`, as a user sees them."""

import re

import pytest
from omegaconf import OmegaConf

from hybridflow.cli.main import main as command
from hybridflow.config.experiment import Experiment
from hybridflow.config.fields import keys
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.trainer import main_dpo, main_kto, main_ppo, main_reward_model, main_sft

PROGRAMS = {
    "ppo": (main_ppo, "calculator"),
    "sft": (main_sft, "calculator"),
    "dpo": (main_dpo, "calculator_pairs"),
    "kto": (main_kto, "calculator_pairs"),
    "reward_model": (main_reward_model, "calculator_reward_model"),
}
_LINE = re.compile(r"^  (?P<key>[a-z_0-9.]+) = (?P<value>.*)   [(].*[)]$", re.MULTILINE)


def told(text: str) -> dict[str, str]:
    """The value that the help shows for each key."""
    return {match["key"]: match["value"] for match in _LINE.finditer(text)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_lists_every_setting_with_its_meaning_and_the_value_that_the_command_would_run_with(name, capsys):
    program, task = PROGRAMS[name]
    assert program.main(["--help", "all"]) == 0
    text = capsys.readouterr().out
    for key in keys():
        assert f"  {key.path} = " in text
        assert " ".join(key.doc.split()) in text
    assert f"task={task} (" in text
    for row in ("roles.<name>.kind = ", "roles.<name>.model.path = ", "placement.pools.<name>.devices = 1"):
        assert f"  {row}" in text
    assert text.count("\ntop level\n") == 1
    assert "trainer.device = auto   (one of: auto, cpu, cuda)" in text
    shown, composed = told(text), compose_run([], config_name=name)
    assert shown["dataflow"] == name
    assert compose_run([f"{key}={value}" for key, value in shown.items()], config_name=name).config == composed.config


def test_help_shows_what_was_typed_beside_it(capsys):
    typed = ["algorithm=dapo", "trainer.seed=7", "roles.judge.kind=reward_function", "dataflow_settings.max_refills=3"]
    assert main_ppo.main([*typed, "--help", "all"]) == 0
    shown = told(capsys.readouterr().out)
    assert (shown["dataflow"], shown["trainer.seed"]) == ("dapo", "7")
    assert "max_refills: 3" in shown["dataflow_settings"]
    assert shown["roles"] == "{judge.kind: reward_function}"
    assert main_dpo.main(["trainer.sed=1", "--help", "all"]) == 0, "a wrong setting beside it is left out"
    assert told(capsys.readouterr().out)["dataflow"] == "dpo"


def test_the_composed_run_is_printed_with_the_origin_of_each_value(capsys):
    assert main_ppo.main(["--cfg", "job", "trainer.seed=7", "algorithm=grpo"]) == 0
    text = capsys.readouterr().out
    printed = OmegaConf.create(text)
    for key in keys():
        OmegaConf.select(printed, key.path, throw_on_missing=True)
        assert key.path.rpartition(".")[0] == "" or OmegaConf.select(printed, key.path.rpartition(".")[0]) is not None
    assert "  seed: 7  # origin: command line" in text
    assert "dataflow: grpo  # origin: file" in text
    assert "  gamma: 1.0  # origin: default" in text


def test_what_is_printed_composes_to_the_same_run():
    composed = compose_run(["roles.judge.pool=null", "data.train_files=[a,b]"], config_name="ppo")
    printed = OmegaConf.create(config_text(composed))
    assert printed.pop("command") == "ppo"
    again = OmegaConf.merge(OmegaConf.structured(Experiment), printed)
    assert OmegaConf.to_object(again) == composed.config


def test_help_alone_fits_on_a_screen_and_shows_the_values_of_the_command(capsys):
    for name, (program, _) in PROGRAMS.items():
        assert program.main(["--help", "trainer.seed=1"]) == 0
        text = capsys.readouterr().out
        assert 20 < len(text.splitlines()) < 40 and max(map(len, text.splitlines())) <= 120
        assert ("reward.functions=[exact_match]" in text) is (name == "ppo")
        assert "--help all" in text and "  trainer.epochs=null " in text
    assert main_ppo.main(["--help", "algorithm=grpo", "trainer.total_steps=7"]) == 0
    assert "  trainer.total_steps=7 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topics", "there", "absent"),
    [
        (["actor.optimizer"], ["actor.optimizer.learning_rate = 0.5 "], ["critic.", "actor.lora.rank"]),
        (["learning_r"], ["actor.optimizer.learning_rate = ", "critic.optimizer.learning_rate"], ["beta1 ="]),
        (["trainer.seed", "placement"], ["trainer.seed = ", "placement.pools.<name>.devices"], ["trainer.devices = "]),
        (["algorithm"], ["algorithm=NAME", "\n  grpo ", "algorithm.kl.placement = "], ["actor.lora"]),
    ],
)
def test_help_prints_the_settings_that_are_asked_for_alone(topics, there, absent, capsys):
    assert command([*["--help", *topics], "actor.optimizer.learning_rate=0.5"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in there) and not any(words in text for words in absent)
    assert command(["grpo", "--help", *topics]) == 0


def test_help_for_a_setting_that_does_not_exist_suggests_one(capsys):
    assert command(["ppo", "--help", "trainer.sed"]) == 2
    assert "Did you mean trainer.seed? All settings: hybridflow --help all." in " ".join(
        capsys.readouterr().err.split()
    )
