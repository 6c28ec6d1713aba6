"""Packages that settings need are found when a run is composed, and named with the setting and the extra."""

import sys
import time

import pytest

from hybridflow.cli.main import main
from hybridflow.errors import MissingExtraError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.rules.packages import package_problems

NEEDS = {
    "rollout.engine=vllm": ("vllm", "[vllm]"),
    "actor.engine=megatron": ("megatron", "[megatron]"),
    "actor.lora.rank=8": ("peft", "[lora]"),
    "trainer.trackers=[wandb]": ("wandb", "[wandb]"),
    "trainer.trackers=[mlflow]": ("mlflow", "[mlflow]"),
    "trainer.checkpoint_url=s3://bucket/run": ("s3fs", "[s3]"),
    "trainer.checkpoint_url=gs://bucket/run": ("gcsfs", "[gcs]"),
    "reward.functions=[math]": ("math_verify", "[math]"),
    "trainer.backend=ray": ("ray", "pip install ray"),
    "trainer.devices=2": ("ray", "pip install ray"),
}


def problems(*words: str) -> list[MissingExtraError]:
    return [*package_problems(compose_run(words, config_name="ppo").config)]


@pytest.mark.parametrize("setting", NEEDS)
def test_a_missing_package_is_named_with_the_setting_that_needs_it(setting, monkeypatch):
    package, remedy = NEEDS[setting]
    monkeypatch.setitem(sys.modules, package, None)
    (found,) = problems(setting)
    assert found.message == f"{setting}: The package '{package}' is not installed."
    assert remedy in found.remedy
    assert problems() == [], "the built-in run needs none of them"


def test_packages_of_roles_rewards_and_data_are_among_them(monkeypatch):
    for package in ("megatron", "math_verify", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)
    found = problems(
        "roles.judge={kind: reward_function, functions: [math]}", 'data.eval_files=["reasoning_gym:sums"]',
        "reward={model: {path: m}, engine: megatron}",
    )  # fmt: skip
    assert [error.message.partition(": The")[0] for error in found] == [
        "reward.engine=megatron",
        "roles.judge.functions=[math]",
        "reasoning_gym:sums",
    ]


def test_a_dry_run_tells_a_missing_package_with_every_other_mistake_before_torch_is_imported(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    began = time.process_time()
    assert main(["grpo", "--dry-run", "rollout.engine=vllm", "actor.lora.rank=8", "trainer.sed=1"]) == 2
    assert time.process_time() - began < 1.0
    said = " ".join(capsys.readouterr().err.split())
    assert "There is no setting 'trainer.sed'" in said and "rollout.engine=vllm: The package 'vllm'" in said
    assert "actor.lora.rank=8: The package 'peft'" in said and "3 problems; nothing was started" in said
