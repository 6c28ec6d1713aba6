"""Runs with a low-rank adapter: its reference costs nothing, it resumes bit for bit, and mistakes are reported."""

import json
from pathlib import Path

import pytest

from tests.distributed.runs import Row, reproducible, rows_of_run, run_here, small_run

LORA = ["actor.lora.rank=4", "actor.optimizer.learning_rate=3e-3", "algorithm.kl.placement=loss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def rows_of(folder: Path, name: str, *settings: str) -> list[Row]:
    return rows_of_run(folder / name, [*small_run(folder), *LORA, *settings])


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Row]:
    """A run of four steps whose reference is its own policy without the adapter."""
    return rows_of(folder, "plain")


def test_a_run_is_sound_and_its_checkpoints_hold_the_adapter_alone(plain, folder):
    assert [row["step"] for row in plain] == [0, 1, 2, 3, 4]
    assert all(abs(row["actor/kl_loss"]) > 1e-6 and row["actor/grad_norm"] > 0.0 for row in plain[1:])
    assert all(row["training/rollout_logprobs_diff_max"] < 1e-4 for row in plain[1:])
    saved = folder / "plain" / "checkpoints" / "step_4" / "actor"
    assert sorted(path.name for path in saved.iterdir()) == ["adapter", "optimizer", "worker.json"]
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_a_reference_loaded_beside_it_gives_the_same_bits(plain, folder):
    own = ["roles.reference.kind=reference", "roles.reference.model.path=builtin:calculator"]
    assert reproducible(rows_of(folder, "loaded", *own)) == reproducible(plain)


def test_it_goes_on_from_a_checkpoint_to_the_last_bit(plain, folder):
    checkpoint = f"trainer.resume={folder}/plain/checkpoints/step_2"
    assert reproducible(rows_of(folder, "resumed", checkpoint)) == reproducible(plain)[-2:]


def test_a_run_that_had_another_adapter_is_not_resumed(plain, folder):
    ended = run_here([*small_run(folder), *LORA, f"trainer.run_dir={folder}/plain", "actor.lora.rank=8"])
    assert ended.status == 2 and "actor.lora.rank was 4 and is 8" in ended.words
