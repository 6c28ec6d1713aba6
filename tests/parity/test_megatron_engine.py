"""Five steps of AdamW on Megatron-Core, by matrix, by layer, by expert and by row, against one device.

The plain engine is held to a loop over rows elsewhere; here losses, gradient norms, outputs and weights of every
layout must be its own, whoever has how many rows, in however many micro-batches.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from tests.parity.divided import BFLOAT16_TOLERANCE, Case, assert_equal, train
from tests.spmd import preload

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}

TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
TURNS = {"pipeline": 2, "virtual_pipeline": 2}
BOTH = {"tensor": 2, "pipeline": 2}
WHOLE_STATE = {"distributed_optimizer": False}
EXPERT = {"expert": 2}

FAST = [
    ("llama", "language", 2, TENSOR),
    ("qwen2", "language", 2, SEQUENCE),
    ("qwen3", "language", 2, PIPELINE),
    ("llama", "language", 2, TURNS),
    ("qwen2", "language", 2, {}),
    ("llama", "language", 2, WHOLE_STATE),
    ("qwen3", "language", 4, BOTH),
    ("qwen3_moe", "language", 2, EXPERT),
    ("qwen3", "value", 2, SEQUENCE),
]

LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, WHOLE_STATE),
    (4, {}),
    (2, TENSOR),
    (2, SEQUENCE),
    (2, PIPELINE),
    (2, TURNS),
    (4, {"pipeline": 4}),
    (4, TENSOR),
    (4, {**SEQUENCE, **WHOLE_STATE}),
    (4, PIPELINE),
    (4, {**TURNS, **WHOLE_STATE}),
    (4, BOTH),
    (4, {**TURNS, **SEQUENCE}),
]
EXPERT_LAYOUTS = [
    (2, EXPERT),
    (2, {**EXPERT, **WHOLE_STATE}),
    (4, {"expert": 4}),
    (4, EXPERT),
    (4, {**EXPERT, **TENSOR}),
    (4, {**EXPERT, **PIPELINE}),
    (4, {**EXPERT, **TURNS, **WHOLE_STATE}),
]
SLOW = [
    (architecture, kind, ranks, sizes)
    for architecture in ("llama", "qwen2", "qwen3", "qwen3_moe")
    for kind in ("language", "value")
    for ranks, sizes in LAYOUTS + (EXPERT_LAYOUTS if architecture == "qwen3_moe" else [])
    if kind == "language" or architecture in ("qwen3", "qwen3_moe")
]


def directory_of(toy_dir, architecture: str) -> Path:
    return toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)


def divided(toy_dir, architecture: str, kind: str, ranks: int, sizes: dict[str, int], **settings: object) -> Case:
    return Case(directory_of(toy_dir, architecture), ranks, TrainingEngine.megatron, sizes, kind, settings=settings)


@pytest.mark.parametrize(("architecture", "kind", "ranks", "sizes"), FAST)
def test_five_steps_equal_those_of_one_device(toy_dir, plain, architecture, kind, ranks, sizes):
    case = divided(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "ranks", "sizes"), SLOW)
def test_five_steps_equal_those_of_one_device_in_every_layout(toy_dir, plain, architecture, kind, ranks, sizes):
    case = divided(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("architecture", "ranks", "sizes"),
    [
        ("qwen3", 2, TURNS),
        pytest.param("qwen3", 2, SEQUENCE, marks=pytest.mark.slow),
        pytest.param("qwen2", 2, {}, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, {**PIPELINE, **SEQUENCE}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, EXPERT, marks=pytest.mark.slow),
    ],
)
def test_neither_micro_batches_nor_recomputed_layers_change_anything(toy_dir, plain, architecture, ranks, sizes):
    case = divided(toy_dir, architecture, "language", ranks, sizes, microbatch_tokens=12, gradient_checkpointing=True)
    assert_equal(train(case), plain(case))


def test_a_vocabulary_that_ranks_do_not_divide_is_padded(toy_dir, plain):
    directory = toy_dir("llama", vocab_size=67, **HEADS)
    case = replace(divided(toy_dir, "llama", "language", 2, TENSOR), directory=directory, steps=2)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {}),
        pytest.param(2, {**SEQUENCE}, marks=pytest.mark.slow),
        pytest.param(4, {**BOTH}, marks=pytest.mark.slow),
        pytest.param(2, WHOLE_STATE, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["language", pytest.param("value", marks=pytest.mark.slow)])
def test_bfloat16_weights_follow_float32_copies(toy_dir, plain, kind, ranks, sizes):
    case = replace(divided(toy_dir, "qwen3", kind, ranks, sizes), dtype=Dtype.bfloat16)
    found = train(case)
    formats = {name: weight.dtype for name, weight in found.weights.items()}
    assert {formats.pop(name, torch.float32) for name in ("score.weight", "score.bias")} == {torch.float32}
    assert set(formats.values()) == {torch.bfloat16}
    assert_equal(found, plain(case), BFLOAT16_TOLERANCE)
