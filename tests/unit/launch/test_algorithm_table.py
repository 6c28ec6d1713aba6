"""The table of algorithms says what the code says."""

import re

import pytest

from docs.reference_pages import algorithms_page
from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.choices import ADVANTAGE_SYNONYMS, POLICY_LOSS_SYNONYMS, PREFERENCE_SYNONYMS
from hybridflow.launch.algorithm_table import Entry, algorithm_table
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.presets import presets
from hybridflow.launch.compose.trainers import TrainingCommand, command_of_dataflow, find_command
from hybridflow.launch.plan.dataflow import DATAFLOWS
from tests.architecture.source import ROOT

TABLES = algorithm_table()
ENTRIES = [entry for entries in TABLES.values() for entry in entries]


def entry(table: str, name: str) -> Entry:
    return next(entry for entry in TABLES[table] if entry.name == name)


def test_every_choice_has_a_row_with_its_synonyms():
    assert {e.name for e in TABLES["Advantages"]} == set(ADVANTAGES)
    assert {e.name for e in TABLES["Policy losses"]} == set(POLICY_LOSSES)
    assert {e.name for e in TABLES["Preference losses"]} == set(PREFERENCE_LOSSES)
    assert {e.name for e in TABLES["Dataflows"]} == set(DATAFLOWS)
    told = {synonym for entry in ENTRIES for synonym in entry.synonyms}
    assert told == {*ADVANTAGE_SYNONYMS, *POLICY_LOSS_SYNONYMS, *PREFERENCE_SYNONYMS}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.name}-{entry.place}")
def test_a_row_names_a_place_and_a_command_that_are_there(entry):
    file, _, name = entry.place.partition(":")
    assert re.search(rf"^(def|class) {name}\b", (ROOT / "hybridflow" / file).read_text(), re.MULTILINE)
    command, *settings = entry.command.removeprefix("hybridflow ").split()
    if entry.command.startswith("hybridflow "):
        found = find_command(command)
        assert found is not None and (ROOT / "hybridflow/trainer" / f"main_{found.trainer}.py").is_file()
        preference = compose_run(found.overrides, config_name=found.trainer).config.algorithm.preference
        assert entry.name in (preference.loss, found.trainer) and not settings
    else:
        preset = presets()[command.removeprefix("algorithm=")]
        own = Algorithm()
        chosen = [preset.get("algorithm", key) or vars(own)[key] for key in ("advantage", "policy_loss")]
        assert entry.name in (*chosen, preset.get("dataflow"))
        assert not settings


def test_needs_follow_from_signatures_and_dataflows():
    assert "critic" in entry("Advantages", "gae").needs
    assert entry("Advantages", "remax").needs == ("greedy pass",)
    assert "group" in entry("Advantages", "rloo").needs
    assert entry("Policy losses", "ppo").needs == ()
    assert "reference" in entry("Preference losses", "ipo").needs
    assert "reference" not in entry("Preference losses", "simpo").needs
    assert {"critic", "cost", "cost_critic"} <= set(entry("Dataflows", "safe_rlhf").needs)


def test_settings_are_shown_as_the_command_has_them():
    assert entry("Advantages", "dr_grpo").settings["algorithm.advantage_settings.divide_by_std"] is False
    gspo = compose_run(["algorithm=gspo"], config_name="ppo").config.algorithm
    assert entry("Policy losses", "gspo").settings["algorithm.clip_low"] == gspo.clip_low
    assert entry("Dataflows", "pf_ppo").settings["dataflow_settings.weighting"] == "max_random"
    safe_rlhf = compose_run(["algorithm=safe_rlhf"], config_name="ppo").config.dataflow_settings
    assert entry("Dataflows", "safe_rlhf").settings["dataflow_settings.cost_limit"] == safe_rlhf["cost_limit"] == 0.25
    assert entry("Policy losses", "kl_cov").settings["algorithm.loss_settings.kl_coefficient"] == 1.0
    for loss, trainer in (("sigmoid", "dpo"), ("kto", "kto")):
        numbers = compose_run([], config_name=trainer).config.algorithm.preference
        assert entry("Preference losses", loss).settings["algorithm.preference.beta"] == numbers.beta == 1.0


def test_the_page_links_papers():
    page = algorithms_page()
    assert "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)" in page
    assert all(f"| `{entry.name}`" in page for entry in ENTRIES)
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("|")}
    assert widths == {7}


def test_a_dataflow_is_run_by_its_preset_or_its_trainer():
    assert command_of_dataflow("safe_rlhf") == TrainingCommand("ppo", ("algorithm=safe_rlhf",))
    assert command_of_dataflow("group_norm") == TrainingCommand("ppo", ("algorithm=grpo",))
    assert command_of_dataflow("sft") == TrainingCommand("sft")
    assert command_of_dataflow("my.py:Mine") == TrainingCommand("ppo", ("dataflow=my.py:Mine",))
