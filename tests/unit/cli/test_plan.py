"""`hybridflow plan`: runs planned for devices that are not here."""

import json
from xml.etree import ElementTree

import pytest
import yaml

from hybridflow.cli.main import main

OPTIONS = ["--on", "4xcpu"]


def test_a_plan_is_saved_as_a_run_file_that_composes_to_the_same_placement(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "ppo", "placement=split", *OPTIONS, "--save", "planned.yaml", "--figure", "planned.svg"]) == 0
    saved = yaml.safe_load((tmp_path / "planned.yaml").read_text())
    assert sum(value for key, value in saved.items() if key.startswith("placement.pools.")) == 4
    assert saved["placement.roles.critic"] != saved["placement.roles.actor"] == saved["placement.roles.rollout"]
    assert ElementTree.parse(tmp_path / "planned.svg").getroot().tag.endswith("svg")
    assert "It fits: a step takes about" in capsys.readouterr().out
    assert main(["run", "planned.yaml", "--dry-run", "trainer.threads=1"]) == 0
    assert f"critic   {saved['placement.roles.critic']}" in capsys.readouterr().err


def test_models_are_known_by_name_and_need_no_data(capsys):
    assert main(["plan", "grpo", "model.path=Qwen3-30B-A3B", "--on", "4x8xH100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"]["parameters"]["actor"] == pytest.approx(30.5e9, rel=0.01)
    assert answer["asked"]["active_parameters"]["actor"] < 4e9


def test_what_cannot_fit_is_answered_with_what_would(capsys):
    assert main(["plan", "ppo", "model.path=70B", "--on", "RTX-4090"]) == 2
    said = capsys.readouterr().out
    assert "It does not fit." in said
    assert "The smallest number of RTX-4090 that fits: 32" in said
    assert "The single change that helps most: GB200" in said


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["--on", "8xH1000"], "'H1000' is not a known device", "Known devices:"),
        (["model.path=Qwen9-32B", "--on", "8xH100"], "'Qwen9-32B' is not a known model", "Give a known name"),
        (["placement=split", "placement.pools.a.devices=1", *OPTIONS], "lets hybridflow choose the pools", "Leave out"),
        (["--on", "cpu", "--save", "none/plan.yaml"], "could not be written", "existing directory"),
    ],
)
def test_wrong_requests_are_named(words, message, remedy, capsys):
    assert main(["plan", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert remedy in said
