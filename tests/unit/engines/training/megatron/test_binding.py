"""Parameters on Megatron-Core in a rollout's memory: which can be, that both see them, that training stays the same."""

import re

import pytest
import torch
from torch import Tensor

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.models.geometry import read_geometry
from hybridflow.models.names.rules import Place
from hybridflow.parallel.boxes import Box, slices_within
from tests.parity.divided import Case, engine_of, global_batch, loss_of, mesh_of, own_rows
from tests.spmd import preload, run_ranks
from tests.toys import logprobs_of, stepped
from tests.unit.engines.training.rollout_memory import vllm_slots

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}

TOLERANCE = {"atol": 1e-5, "rtol": 1e-6}
"""float32: products of the same numbers in one piece here and in several there; log-probabilities are down to -30."""


def bind_and_train(rank: int, case: Case, rollout_tensor: int, trained_first: bool) -> tuple[set[str], set[str]]:
    """The names a rank holds and those it bound, once every promise of `bind` has been seen to hold."""
    plain, engine, mesh = engine_of(case, rank), engine_of(case, rank), mesh_of(case)
    coordinate = mesh.coordinate(rank)["tensor"] * rollout_tensor // mesh.axis_size("tensor")
    slots = vllm_slots(read_geometry(case.directory), Place(tensor=coordinate, tensor_size=rollout_tensor))
    if trained_first:
        train(engine, case, rank)
        train(plain, case, rank)
    before = held(engine)
    names = engine.bind(slots)
    after = held(engine)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), "binding changed a weight"
    with torch.profiler.profile() as profile:
        numbers = train(engine, case, rank)
    kernels = {event.key for event in profile.key_averages()}
    assert "aten::_fused_adamw_" in kernels and "aten::_foreach_sqrt" not in kernels, "the fused optimizer was left"
    torch.testing.assert_close(numbers, train(plain, case, rank), **TOLERANCE)
    torch.testing.assert_close(held(engine), held(plain), **TOLERANCE)
    for shard in engine.weight_shards():
        if shard.name in names:
            there = slots[shard.name].tensor[slices_within(shard.layout.box, slots[shard.name].layout.box)]
            assert there.data_ptr() == shard.tensor.data_ptr(), f"{shard.name} is not in its slot"
            assert torch.equal(there, shard.tensor)
            assert not torch.equal(there, before[shard.name, shard.layout.box]), f"{shard.name} was not trained"
    return {shard.name for shard in engine.weight_shards()}, names


def held(engine: TrainEngine) -> dict[tuple[str, Box], Tensor]:
    return {(shard.name, shard.layout.box): shard.tensor.clone() for shard in engine.weight_shards()}


def train(engine: TrainEngine, case: Case, rank: int) -> Tensor:
    """Two steps: gradient norms, and log-probabilities before and after each."""
    mesh, numbers = mesh_of(case), []
    for step in range(2):
        batch = global_batch(step, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        numbers += logprobs_of(engine, rows).values.tolist()
        numbers.append(stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value)
        numbers += logprobs_of(engine, rows).values.tolist()
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    ("architecture", "ranks", "sizes", "rollout_tensor"),
    [
        ("llama", 2, {"tensor": 2}, 2),
        ("qwen2", 2, {"tensor": 2, "sequence_parallel": True}, 1),
        ("qwen3", 2, {"pipeline": 2}, 1),
        ("qwen3", 2, {}, 1),
        ("qwen3_moe", 2, {"tensor": 2}, 2),
        pytest.param("qwen3", 4, {"tensor": 2, "pipeline": 2}, 2, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, {"tensor": 2}, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, {"expert": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 4, {"pipeline": 2, "virtual_pipeline": 2}, 1, marks=pytest.mark.slow),
    ],
)
def test_all_weights_live_in_a_rollout_as_wide_or_narrower(toy_dir, architecture, ranks, sizes, rollout_tensor):
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)
    case = Case(directory, ranks, TrainingEngine.megatron, sizes)
    trained_first = ranks == 2 and sizes == {}
    for held_names, bound in run_ranks(bind_and_train, ranks, case, rollout_tensor, trained_first):
        assert bound == held_names


def test_what_a_wider_rollout_divides_further_is_not_bound(toy_dir):
    case = Case(toy_dir("llama", **HEADS), 2, TrainingEngine.megatron, {})
    norms = r"norm|layernorm"
    for held_names, bound in run_ranks(bind_and_train, 2, case, 2, False):
        assert bound == {name for name in held_names if re.search(norms, name)}
