"""Training stopped on Megatron-Core and resumed elsewhere, or the other way round, goes on as if nothing happened."""

from dataclasses import replace

import pytest

from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from tests.parity.divided import BFLOAT16_TOLERANCE, Case, assert_equal
from tests.parity.test_fsdp_checkpoints import SINGLE, fsdp, stopped_and_resumed
from tests.parity.test_megatron_engine import directory_of
from tests.spmd import preload

preload("hybridflow.engines.training.megatron.engine")


def megatron(ranks: int, **sizes: int):
    return TrainingEngine.megatron, ranks, sizes


@pytest.mark.parametrize(
    ("architecture", "kind", "first", "second"),
    [
        ("qwen3", "language", megatron(2), megatron(2, pipeline=2)),
        ("qwen3", "language", SINGLE, megatron(2, tensor=2)),
        ("llama", "value", megatron(2, tensor=2), fsdp(2)),
        pytest.param("qwen3", "language", megatron(4, tensor=2, pipeline=2), SINGLE, marks=pytest.mark.slow),
        pytest.param("qwen3", "language", fsdp(3), megatron(4, pipeline=2), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "language", megatron(4, expert=2), megatron(2, tensor=2), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "value", SINGLE, megatron(4, expert=2, pipeline=2), marks=pytest.mark.slow),
    ],
)
def test_another_layout_goes_on(toy_dir, tmp_path, architecture, kind, first, second):
    case = Case(directory_of(toy_dir, architecture), kind=kind)
    assert_equal(*stopped_and_resumed(case, first, second, tmp_path))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (megatron(2), megatron(2, tensor=2)),
        pytest.param(megatron(2, pipeline=2), fsdp(2), marks=pytest.mark.slow),
        pytest.param(SINGLE, megatron(4, pipeline=2), marks=pytest.mark.slow),
    ],
)
def test_float32_copies_of_bfloat16_weights_go_on(toy_dir, tmp_path, first, second):
    case = replace(Case(directory_of(toy_dir, "qwen3")), dtype=Dtype.bfloat16)
    assert_equal(*stopped_and_resumed(case, first, second, tmp_path), BFLOAT16_TOLERANCE)
