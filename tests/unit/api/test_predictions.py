"""`hybridflow.plan(..., on=...)`: the predicted step in Python."""

import pytest

import hybridflow
from hybridflow.cli.main import main


def test_a_plan_on_other_devices_has_the_step_that_the_command_prints(capsys):
    settings = {"model.path": "Qwen3-30B-A3B", "data.batch_size": 512}
    predicted = hybridflow.plan("grpo", settings, on="4x8xH100").predicted
    assert predicted is not None and predicted.seconds is not None
    assert main(["plan", "grpo", *(f"{key}={value}" for key, value in settings.items()), "--on", "4x8xH100"]) == 0
    assert repr(predicted) == capsys.readouterr().out.rstrip("\n")
    assert predicted.calls.to_pandas()["seconds"].sum() == pytest.approx(predicted.seconds)
    assert predicted.memory.to_pandas()["gib"].max() < 80
    assert predicted.placements["seconds"][0] == predicted.seconds
    assert set(predicted.roles["role"]) == {"actor", "rollout"}
    assert predicted._repr_html_().startswith("<svg")


def test_a_step_that_fits_nowhere_has_no_seconds():
    predicted = hybridflow.plan("ppo", {"model.path": "70B"}, on="RTX-4090").predicted
    assert predicted is not None and predicted.seconds is None
    assert len(predicted.calls) == len(predicted.placements) == 0
    assert "The smallest number of RTX-4090 that fits" in repr(predicted)


def test_an_unknown_device_is_a_problem_and_without_devices_nothing_is_predicted():
    plan = hybridflow.plan("ppo", on="8xH1000")
    assert plan.predicted is None
    assert "'H1000' is not a known device" in plan.problems[0].message
    assert hybridflow.plan("ppo").predicted is None
