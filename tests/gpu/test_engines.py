"""Each training engine on a device, and attention over packed sequences, against the CPU's float32 numbers."""

from importlib.util import find_spec

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.model import Dtype, Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.models.packed_attention import packed_attention
from hybridflow.models.packing import Packing
from hybridflow.parallel.groups import Ranks
from tests.spmd import run_ranks
from tests.toys import logprobs_of, sequences, stepped
from tests.unit.engines.training.engines import GENTLE, likelihood_loss

NEEDS_MEGATRON = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
KINDS = ["single", "fsdp", pytest.param("megatron", marks=[pytest.mark.megatron, NEEDS_MEGATRON])]
TOLERANCES = {Dtype.float32: 2e-3, Dtype.bfloat16: 0.2}
"""Largest difference of a log-probability: a GPU may multiply float32 in TF32, and bfloat16 keeps 8 bits."""


def before_and_after(rank: int, directory: str, kind: str, dtype: Dtype, device: str) -> list[list[float]]:
    """Log-probabilities before and after an optimizer step, in a process of its own."""
    if device != "cpu":
        Rendezvous().process_group("test")  # with NCCL
    training = Training(engine=TrainingEngine[kind], optimizer=GENTLE)
    engine = make_language_engine(
        Model(path=directory, dtype=dtype),
        training,
        total_optimizer_steps=10,
        device=torch.device(device),
        ranks=Ranks.alone(),
    )
    batch: Batch = sequences()
    before = logprobs_of(engine, batch).values.tolist()
    stepped(engine, batch, likelihood_loss)
    return [before, logprobs_of(engine, batch).values.tolist()]


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_agrees_with_the_cpu_before_and_after_a_step(toy_dir, device, kind, dtype):
    case = (str(toy_dir("qwen3")), kind, dtype, str(device))
    (found,) = run_ranks(before_and_after, 1, *case)
    (expected,) = run_ranks(before_and_after, 1, case[0], "single", Dtype.float32, "cpu")
    for ours, theirs in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < TOLERANCES[dtype]
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) > 1e-3, "the step changed nothing"


@pytest.mark.parametrize("window", [None, 7])
def test_attention_in_bfloat16_agrees_with_float32(device, window):
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 17, 40, 1)
    query, key, value = (torch.randn(sum(lengths), heads, 32, generator=generator) for heads in (4, 2, 2))
    exact = packed_attention(query, key, value, Packing(lengths, torch.device("cpu")), window=window)
    halves = [part.to(device, torch.bfloat16) for part in (query, key, value)]
    found = packed_attention(*halves, Packing(lengths, device), window=window)
    assert float((found.float().cpu() - exact).abs().max()) < 0.05
