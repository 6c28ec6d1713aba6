"""Five steps of AdamW in shards, with copies of shards, by matrix and by token, against one device.

The plain engine is held to a loop over rows elsewhere; here losses, gradient norms, outputs and weights of every
layout must be its own, whoever has how many rows, in however many micro-batches.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from tests.parity.divided import BFLOAT16_TOLERANCE, TOLERANCE, Case, assert_equal, train

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

FAST = [
    ("llama", "language", 2, {}),
    ("qwen3", "language", 2, {"tensor": 2}),
    ("qwen2", "language", 2, {"sequence": 2}),
    ("qwen3_moe", "language", 2, {"replicas": 2}),
    ("qwen3", "value", 2, {}),
]
LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (4, {}),
    (2, {"replicas": 2}),
    (4, {"replicas": 2}),
    (2, {"sequence": 2}),
    (4, {"sequence": 2}),
    (4, {"sequence": 4}),
    (2, {"tensor": 2}),
    (4, {"tensor": 2}),
    (4, {"tensor": 2, "replicas": 2}),
    (4, {"tensor": 2, "sequence": 2}),
]
SLOW = [
    (architecture, kind, ranks, sizes)
    for architecture in ("llama", "qwen2", "qwen3", "qwen3_moe")
    for kind in ("language", "value")
    for ranks, sizes in LAYOUTS
    if not (architecture == "qwen3_moe" and "tensor" in sizes)
    if kind == "language" or architecture in ("qwen3", "qwen3_moe")
]


def directory_of(toy_dir, architecture: str) -> Path:
    return toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)


def sharded(toy_dir, architecture: str, kind: str, ranks: int, sizes: dict[str, int], **settings: object) -> Case:
    return Case(directory_of(toy_dir, architecture), ranks, TrainingEngine.fsdp, sizes, kind, settings=settings)


@pytest.mark.parametrize(("architecture", "kind", "ranks", "sizes"), FAST)
def test_five_steps_equal_those_of_one_device(toy_dir, plain, architecture, kind, ranks, sizes):
    case = sharded(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "ranks", "sizes"), SLOW)
def test_five_steps_equal_those_of_one_device_in_every_layout(toy_dir, plain, architecture, kind, ranks, sizes):
    case = sharded(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {}),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"sequence": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_neither_micro_batches_nor_recomputed_layers_change_anything(toy_dir, plain, ranks, sizes):
    case = sharded(toy_dir, "qwen3", "language", ranks, sizes, microbatch_tokens=12, gradient_checkpointing=True)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize("architecture", ["mistral", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_ranks_that_divide_tokens_keep_to_a_models_windows(toy_dir, plain, architecture):
    window = {"sliding_window": 4} | (
        {"use_sliding_window": True, "max_window_layers": 1} if architecture == "qwen2" else {}
    )
    directory = toy_dir(architecture, **window, **HEADS)
    case = Case(directory, 2, TrainingEngine.fsdp, {"sequence": 2}, steps=2)
    assert_equal(train(case), plain(case))


@pytest.mark.parametrize(
    ("architecture", "kind", "dtype", "limit"),
    [
        ("llama", "language", Dtype.float32, 100 * TOLERANCE["weights"]),
        ("qwen3", "language", Dtype.bfloat16, 1.5 * BFLOAT16_TOLERANCE["weights"]),
        ("qwen3", "value", Dtype.bfloat16, 1.5 * BFLOAT16_TOLERANCE["weights"]),
    ],
)
def test_the_tolerance_would_show_a_lost_row(toy_dir, plain, architecture, kind, dtype, limit):
    case = replace(sharded(toy_dir, architecture, kind, 1, {}), dtype=dtype)
    lost, whole = train(replace(case, lost_rows=1)).weights, plain(case).weights
    assert max(float((lost[name] - whole[name]).abs().max()) for name in whole) > limit


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"sequence": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["language", pytest.param("value", marks=pytest.mark.slow)])
def test_bfloat16_weights_follow_float32_copies(toy_dir, plain, kind, ranks, sizes):
    case = replace(sharded(toy_dir, "qwen3", kind, ranks, sizes), dtype=Dtype.bfloat16)
    found = train(case)
    formats = {name: weight.dtype for name, weight in found.weights.items()}
    assert {formats.pop(name, torch.float32) for name in ("score.weight", "score.bias")} == {torch.float32}
    assert set(formats.values()) == {torch.bfloat16}
    assert_equal(found, plain(case), BFLOAT16_TOLERANCE)
