"""Training stopped in one layout and resumed in another goes on as if nothing had happened."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from tests.parity.divided import BFLOAT16_TOLERANCE, Case, Trained, assert_equal, train
from tests.parity.test_fsdp_engine import directory_of

SINGLE = (TrainingEngine.single, 1, {})


def fsdp(ranks: int, **sizes: int):
    return TrainingEngine.fsdp, ranks, sizes


def stopped_and_resumed(case: Case, first, second, directory) -> tuple[Trained, Trained]:
    """Two steps in one layout and three in the other, and the last three of five on one device."""
    target = directory / "checkpoint"
    begun = train(replace(_laid_out(case, first), steps=2, save_to=target))
    resumed = train(replace(_laid_out(case, second), steps=3, first_step=2, resume_from=target))
    whole = train(_laid_out(case, SINGLE))
    whole.losses, whole.norms, whole.outputs = whole.losses[2:], whole.norms[2:], whole.outputs[2:]
    saved = AutoModelForCausalLM.from_pretrained(target / "huggingface") if case.kind == "language" else None
    if saved is not None:
        for name, weight in saved.named_parameters():
            if name in begun.weights:  # transformers stacks experts
                assert torch.equal(weight, begun.weights[name].to(weight.dtype)), name
    return resumed, whole


def _laid_out(case: Case, layout) -> Case:
    engine, ranks, sizes = layout
    return replace(case, engine=engine, ranks=ranks, sizes=sizes)


@pytest.mark.parametrize(
    ("architecture", "kind", "first", "second"),
    [
        ("qwen3", "language", fsdp(2), fsdp(2, tensor=2)),
        ("qwen3_moe", "value", fsdp(2), SINGLE),
        pytest.param("qwen3", "language", SINGLE, fsdp(4, tensor=2), marks=pytest.mark.slow),
        pytest.param("qwen3", "language", fsdp(4, tensor=2, sequence=2), fsdp(3), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "language", fsdp(3), fsdp(4, replicas=2), marks=pytest.mark.slow),
        pytest.param("llama", "value", fsdp(4, replicas=2), fsdp(2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_another_layout_goes_on(toy_dir, tmp_path, architecture, kind, first, second):
    case = Case(directory_of(toy_dir, architecture), kind=kind)
    assert_equal(*stopped_and_resumed(case, first, second, tmp_path))


@pytest.mark.slow
def test_float32_copies_of_bfloat16_weights_go_on(toy_dir, tmp_path):
    case = Case(directory_of(toy_dir, "qwen3"), dtype=Dtype.bfloat16)
    assert_equal(*stopped_and_resumed(case, fsdp(2), fsdp(2, tensor=2), tmp_path), BFLOAT16_TOLERANCE)
