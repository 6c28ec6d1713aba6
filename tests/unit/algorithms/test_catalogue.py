"""Whatever has a name can be chosen, and whatever is written can be reached."""

from pathlib import Path

import pytest

import hybridflow.algorithms
from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from hybridflow.config import choices
from hybridflow.launch.compose.compose import compose_run

PRESETS = {"gae": "ppo"}
"""Presets that are not called like what they choose."""

ALGORITHMS = Path(str(hybridflow.algorithms.__file__)).parent
WORKERS = ALGORITHMS.parent / "workers"


@pytest.mark.parametrize(
    ("synonyms", "names"),
    [
        (choices.ADVANTAGE_SYNONYMS, ADVANTAGES),
        (choices.POLICY_LOSS_SYNONYMS, POLICY_LOSSES),
        (choices.PREFERENCE_SYNONYMS, PREFERENCE_LOSSES),
    ],
)
def test_every_synonym_is_of_a_name(synonyms, names):
    assert set(synonyms.values()) <= set(names)
    assert not set(synonyms) & set(names)


@pytest.mark.parametrize(("field", "names"), [("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES)])
def test_every_method_has_a_preset_that_chooses_it(field, names):
    for name in names:
        chosen = compose_run([f"algorithm={PRESETS.get(name, name)}"], config_name="ppo").config.algorithm
        assert {"advantage": chosen.advantage, "policy_loss": chosen.policy_loss}[field] == name


@pytest.mark.parametrize(("folder", "readers"), [("advantages", []), ("losses", sorted(WORKERS.glob("*.py")))])
def test_every_file_of_formulas_is_reached_from_the_catalogue_or_a_worker(folder, readers):
    read = "".join(file.read_text() for file in [ALGORITHMS / "catalogue.py", *readers])
    stems = {file.stem for file in (ALGORITHMS / folder).glob("*.py")} - {"__init__"}
    assert len(stems) > 5
    assert not {stem for stem in stems if f"{folder}.{stem}" not in read}
