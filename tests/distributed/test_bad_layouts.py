"""Layouts that a model, an engine or the devices cannot have are reported before anything starts."""

from pathlib import Path

import pytest

from tests.distributed.runs import run_here, small_run
from tests.distributed.test_bad_input import assert_refused
from tests.toys import MakeToy

MEGATRON = ["trainer.devices=4", "actor.engine=megatron"]
VLLM = ["rollout.engine=vllm"]
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}

REFUSED = [
    (
        [*MEGATRON, "actor.parallelism.tensor=3"],
        "actor.parallelism.tensor=3: 3 does not divide the 4 devices of pool 'main'",
        "Use sizes whose product is one of: 1, 2, 4.",
    ),
    (
        [*MEGATRON, "actor.parallelism.tensor=4"],
        "actor.parallelism.tensor=4 does not divide the model's 2 key-value heads",
        "the model has 2 layers, 4 heads, 2 key-value heads",
    ),
    (
        [*MEGATRON, "actor.parallelism.pipeline=4"],
        "actor.parallelism.pipeline=4 is more than the model's 2 layers",
        "the model has 2 layers",
    ),
    (
        [*MEGATRON, "actor.parallelism.expert=2"],
        "actor.parallelism.expert=2 divides experts, and the model has none",
        "the model has 2 layers",
    ),
    (
        ["trainer.devices=2", "actor.engine=fsdp", "actor.parallelism.pipeline=2"],
        "actor.parallelism.pipeline=2, but actor.engine=fsdp does not divide a model so",
        "actor.engine=megatron",
    ),
    (
        ["trainer.devices=8", "actor.engine=fsdp", "actor.parallelism.sequence=8"],
        "actor.parallelism.sequence=8 does not divide the 4 attention heads",
        "the model has 2 layers, 4 heads",
    ),
    (
        ["trainer.devices=8", "actor.parallelism.tensor=2", *VLLM, "rollout.parallelism.tensor=8"],
        "rollout.parallelism.tensor=8",
        "4",
    ),
    (
        ["trainer.devices=3", *VLLM, "rollout.parallelism.tensor=2"],
        "rollout.parallelism.tensor=2 rollout.parallelism.pipeline=1: 2 does not divide the 3 devices of pool 'main'",
        "Use sizes whose product is one of: 1, 3.",
    ),
    (
        ["trainer.devices=2", *VLLM, "rollout.parallelism.pipeline=2", "trainer.device=cpu"],
        "rollout.parallelism.pipeline=2",
        "rollout.parallelism.pipeline=1",
    ),
    (
        ["trainer.devices=2", "rollout.engine=transformers", "rollout.parallelism.tensor=2"],
        "rollout.parallelism.tensor=2, but rollout.engine=transformers holds a whole model on each device",
        "rollout.engine=vllm",
    ),
    (
        ["trainer.devices=2", "data.eval_limit=1"],
        "data.eval_files: 1 prompts cannot be divided over the 2 ranks of 'rollout'",
        "Give 2 prompts or more",
    ),
    (
        ["trainer.devices=2", "trainer.backend=local"],
        "trainer.backend=local has one process, and the run has 2 devices",
        "trainer.backend=ray",
    ),
]


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.parametrize(("settings", "found", "remedy"), REFUSED, ids=[found for _, found, _ in REFUSED])
def test_a_layout_that_cannot_be_is_told(tmp_path: Path, toy_dir: MakeToy, settings, found, remedy):
    model = [f"model.path={toy_dir(**SIZES)}", "trainer.backend=auto", f"trainer.run_dir={tmp_path}/run"]
    ended = run_here([*small_run(tmp_path), *model, *settings])
    assert_refused(ended, tmp_path, found, remedy)
