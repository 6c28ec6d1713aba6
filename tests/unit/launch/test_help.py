"""`--help` and `--cfg job`, as a user sees them."""

import pytest
from omegaconf import OmegaConf

from hybridflow.config.experiment import Experiment
from hybridflow.config.fields import keys
from hybridflow.launch.compose import compose_run
from hybridflow.launch.help import config_text
from hybridflow.trainer import main_ppo, main_sft


@pytest.mark.parametrize("program", [main_ppo, main_sft])
def test_help_lists_every_setting_with_its_type_default_and_meaning(program, capsys):
    assert program.main(["--help"]) == 0
    text = capsys.readouterr().out
    for key in keys():
        assert f"  {key.path} = " in text
        assert " ".join(key.doc.split()) in text
    for row in ("roles.<name>.kind = ", "roles.<name>.model.path = ", "placement.pools.<name>.devices = 1"):
        assert f"  {row}" in text
    assert text.count("\ntop level\n") == 1
    assert "trainer.device = auto   (one of: auto, cpu, cuda)" in text
    assert "key=value" in text


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


def test_every_line_with_a_value_has_its_origin():
    text = config_text(compose_run(["roles.judge.kind=reference"], config_name="ppo"))
    values = [line for line in text.splitlines() if not line.lstrip().startswith("- ") and not line.endswith(":")]
    assert [line for line in values if "# origin: " not in line] == []


def test_a_setting_that_cannot_work_is_status_2_with_the_remedy(capsys):
    assert main_ppo.main(["trainer.sed=1"]) == 2
    shown = capsys.readouterr().err
    assert "There is no setting 'trainer.sed'" in shown
    assert "What to do: Did you mean trainer.seed?" in shown
