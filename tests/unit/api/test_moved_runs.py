"""A run with objects from Python whose directory was moved: resumed, evaluated, exported and reported there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import hybridflow
from hybridflow.cli.main import main
from tests.toys import toy_model

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
SETTINGS = {
    "data": {"batch_size": 4, "max_prompt_tokens": 8, "max_response_tokens": 6},
    "rollout.samples_per_prompt": 2,
    "trainer": {"total_steps": 2, "eval_every": 2, "save_every": 1, "threads": 1, "device": "cpu"},
    "actor.optimizer.learning_rate": 0.01,
    "reward.processes": 0,
}
MORE = {"trainer.total_steps": 4}
LONGEST = 6.0


def shorter(completion_ids, **columns):
    return [-len(ids) / LONGEST for ids in completion_ids]


@pytest.fixture
def trained(tmp_path, monkeypatch, toy_dir) -> Callable[..., Path]:
    """Trains for two steps in a directory below the current one."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, **settings: object) -> Path:
        torch.manual_seed(0)
        objects = {"model": toy_model("llama"), "tokenizer": AutoTokenizer.from_pretrained(toy_dir())}
        settings = {**SETTINGS, "trainer.experiment": name, **settings}
        hybridflow.run("grpo", settings, data=ROWS, eval_data=ROWS[:3], reward=shorter, **objects)
        return Path("runs", name)

    return run


def elsewhere(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Moves a run, and makes another directory the current one."""
    there = Path("elsewhere").absolute()
    there.mkdir()
    shutil.move(run_dir, there / "moved")
    shutil.rmtree("runs")
    monkeypatch.chdir(there)
    return there / "moved"


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"checkpoints/step_{step}/actor/huggingface/model.safetensors")


@pytest.mark.parametrize("command", [pytest.param(False, marks=pytest.mark.slow), True], ids=["python", "command"])
def test_a_moved_run_resumes_bit_for_bit_as_one_that_stayed(trained, monkeypatch, command):
    stayed = hybridflow.Experiment.load(trained("stayed") / "config.yaml").with_settings(MORE).run()
    assert stayed.run_dir == Path("runs/stayed").absolute()
    expected = weights(stayed.run_dir, 4)

    moved = elsewhere(trained("first"), monkeypatch)
    if command:
        assert main(["run", "moved/config.yaml", "trainer.total_steps=4"]) == 0
    else:
        assert hybridflow.Experiment.load("moved/config.yaml").with_settings(MORE).run().run_dir == moved
    assert hybridflow.Result("moved").metrics["step"] == [0, 1, 2, 3, 4]
    found = weights(moved, 4)
    assert all(torch.equal(found[name], expected[name]) for name in expected.keys() | found.keys())
    assert not Path("runs").exists(), "something was written where the run was"


def test_a_moved_run_is_evaluated_exported_and_reported(trained, monkeypatch, capsys):
    moved = elsewhere(trained("first"), monkeypatch)
    quick = ["trainer.threads=1", "trainer.device=cpu", "reward.processes=0"]
    assert main(["evaluate", "moved", *quick]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["data", "3"]
    assert main(["report", "moved"]) == 0
    assert main(["export", "moved", "model"]) == 0
    assert Path("model/config.json").is_file()
    assert (moved / "report.html").is_file()
    shutil.copytree(moved, "copy")
    plan = hybridflow.Experiment.load("copy/config.yaml").with_settings(MORE).plan()
    assert not plan.problems and "resumes from step 2" in plan.text


@pytest.mark.lora
def test_the_adapter_of_a_moved_run_is_merged_into_the_model_that_was_moved_with_it(trained, monkeypatch):
    moved = elsewhere(trained("first", **{"actor.lora.rank": 2}), monkeypatch)
    assert hybridflow.Result(moved).model().num_parameters() > 0
    quick = ["trainer.threads=1", "trainer.device=cpu", "reward.processes=0"]
    assert main(["evaluate", "moved", *quick]) == 0


def test_another_experiment_does_not_continue_the_run_of_a_record(trained, monkeypatch):
    moved = elsewhere(trained("first"), monkeypatch)
    experiment = hybridflow.Experiment.load("moved/config.yaml")
    other = experiment.with_settings({"trainer.experiment": "second", "trainer.total_steps": 1}).run()
    assert other.run_dir == Path("runs/second").absolute() and other.metrics["step"] == [0, 1]
    assert hybridflow.Result(moved).metrics["step"] == [0, 1, 2]
