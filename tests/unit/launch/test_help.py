"""`--help` and `--cfg job`, as a user sees them."""

import re

import pytest
from omegaconf import OmegaConf

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
    assert program.main(["--help"]) == 0
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
    assert main_ppo.main([*typed, "--help"]) == 0
    shown = told(capsys.readouterr().out)
    assert (shown["dataflow"], shown["trainer.seed"]) == ("dapo", "7")
    assert "max_refills: 3" in shown["dataflow_settings"]
    assert shown["roles"] == "{judge.kind: reward_function}"
    assert main_dpo.main(["trainer.sed=1", "--help"]) == 0, "a wrong setting beside it is left out"
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
    again = OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.create(config_text(composed)))
    assert OmegaConf.to_object(again) == composed.config
