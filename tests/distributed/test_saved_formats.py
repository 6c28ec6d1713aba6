"""Checkpoints of earlier versions, in `tests/checkpoints/format_N`: they load for as long as format N is read.

`format_2` is from a PPO run in bfloat16 on a llama of one layer and width 8 (`tests.toys.toy_model`) in `model`, after

    hybridflow ppo algorithm=ppo task=calculator model.path=model model.dtype=bfloat16 data.batch_size=8 \
        trainer.total_steps=2 trainer.save_every=2 trainer.eval_every=0 trainer.run_dir=run trainer.device=cpu
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.config.model import Dtype, Model
from hybridflow.config.training import Training
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.engines.training.factory import make_language_engine, make_value_engine
from hybridflow.parallel.groups import Ranks
from tests.distributed.runs import run_well, steps_of

SAVED = Path(__file__).parents[1] / "checkpoints"
FORMATS = [2]
FILE = "model.safetensors"
MAKERS = {"actor": make_language_engine, "critic": make_value_engine}


@pytest.mark.parametrize("number", FORMATS)
@pytest.mark.parametrize("role", MAKERS)
def test_engines_read_every_tensor_of_a_saved_checkpoint(number, role, tmp_path):
    saved, base = SAVED / f"format_{number}", tmp_path / "base"
    shutil.copytree(saved / "actor" / "huggingface", base)
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(base / FILE).items()}, base / FILE)
    model = Model(path=str(base), dtype=Dtype.bfloat16)
    engine = MAKERS[role](model, Training(), total_optimizer_steps=9, device=torch.device("cpu"), ranks=Ranks.alone())
    engine.load(saved / role)
    engine.save(tmp_path / role)
    for part in ("huggingface", "optimizer"):
        wanted, found = load_file(saved / role / part / FILE), load_file(tmp_path / role / part / FILE)
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            assert torch.equal(tensor, found[name]), name
    numbers = [json.loads((path / role / "optimizer" / "numbers.json").read_text()) for path in (saved, tmp_path)]
    assert numbers[0] == numbers[1] == {"steps": 2}


@pytest.mark.parametrize("number", FORMATS)
def test_a_run_resumes_from_a_saved_checkpoint(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the saved settings name the model by a relative path
    saved = CheckpointStore(tmp_path).open(SAVED / f"format_{number}")
    assert (saved.step, saved.manifest.parts) == (2, ["actor", "critic"])
    shutil.copytree(saved.path / "actor" / "huggingface", tmp_path / "model")
    words = ["algorithm=ppo", "task=calculator", "model.path=model", "model.dtype=bfloat16"]
    words += ["data.batch_size=8", "trainer={total_steps: 3, save_every: 3, eval_every: 0, device: cpu}"]
    words += [f"trainer.run_dir={tmp_path}/run", f"trainer.resume={saved.path}", "trainer.resume_changed=accept"]
    words += [f"{role}.optimizer.schedule=constant" for role in saved.manifest.parts]
    ended = run_well(words)
    assert "format_2 step=2" in ended.words
    assert steps_of(tmp_path / "run") == [3]
    assert CheckpointStore(tmp_path / "run").open(tmp_path / "run/checkpoints/step_3").step == 3
