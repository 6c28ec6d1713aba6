"""Parameters that live in a rollout's memory: which can, that both sides see it, and that training stays the same."""

import re

import pytest
import torch
from torch import Tensor

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.models.geometry import read_geometry
from hybridflow.models.names.rules import Place
from hybridflow.parallel.boxes import Box
from tests.parity.divided import Case, engine_of, global_batch, loss_of, mesh_of, own_rows
from tests.spmd import run_ranks
from tests.toys import logprobs_of, stepped
from tests.unit.engines.training.rollout_memory import vllm_slots

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def bind_and_train(rank: int, case: Case, rollout_tensor: int) -> set[str]:
    """The names bound, once every promise of `bind` has been seen to hold."""
    plain, engine, mesh = engine_of(case, rank), engine_of(case, rank), mesh_of(case)
    axis = "tensor" if mesh.axis_size("tensor") > 1 else "data"
    rollout_rank = mesh.index_along(rank, (axis,)) * rollout_tensor // mesh.axis_size(axis)
    slots = vllm_slots(read_geometry(case.directory), Place(tensor=rollout_rank, tensor_size=rollout_tensor))
    before = held(engine)
    names = engine.bind(slots)
    assert_same(held(engine), before)
    assert trained(engine, case, rank) == trained(plain, case, rank), "training changed"
    assert_same(held(engine), held(plain))
    for shard in engine.weight_shards():
        if shard.name in names:
            slot = slots[shard.name]
            own = zip(shard.layout.box, slot.layout.box, strict=True)
            there = slot.tensor[tuple(slice(low - first, high - first) for (low, high), (first, _) in own)]
            assert there.data_ptr() == shard.tensor.data_ptr(), f"{shard.name} is not in its slot"
            assert torch.equal(there, shard.tensor)
            assert not torch.equal(there, before[shard.name, shard.layout.box]), f"{shard.name} was not trained"
    return names


def held(engine: TrainEngine) -> dict[tuple[str, Box], Tensor]:
    return {(shard.name, shard.layout.box): shard.tensor.clone() for shard in engine.weight_shards()}


def assert_same(found: dict[tuple[str, Box], Tensor], expected: dict[tuple[str, Box], Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
    assert not different, different


def trained(engine: TrainEngine, case: Case, rank: int) -> list[float]:
    """Two steps: gradient norms, and log-probabilities before and after each."""
    mesh, numbers = mesh_of(case), []
    for step in range(2):
        batch = global_batch(step, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        numbers += logprobs_of(engine, rows).values.tolist()
        numbers.append(stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value)
        numbers += logprobs_of(engine, rows).values.tolist()
    return numbers


def bound_by(toy_dir, architecture: str, ranks: int, rollout_tensor: int, **sizes: int) -> list[set[str]]:
    directory = toy_dir(architecture, **HEADS)
    return run_ranks(bind_and_train, ranks, Case(directory, ranks, TrainingEngine.fsdp, sizes), rollout_tensor)


def kinds(names: set[str]) -> set[str]:
    """Names without the numbers of layers and experts, and without what all have."""
    return {re.sub(r"(model|layers|experts|self_attn|mlp|weight)\.?|\d+\.", "", name).strip(".") for name in names}


DENSE = {
    *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def test_two_shards_are_rows_of_a_whole_rollout(toy_dir):
    assert [kinds(names) for names in bound_by(toy_dir, "qwen3", 2, 1)] == [DENSE, DENSE]


def test_rows_of_a_divided_rollout_are_bound_and_columns_are_not(toy_dir):
    assert [kinds(names) for names in bound_by(toy_dir, "qwen3", 2, 2)] == [DENSE - {"o_proj", "down_proj"}] * 2


def test_matrices_divided_alike_are_bound_columns_and_all(toy_dir):
    assert [kinds(names) for names in bound_by(toy_dir, "qwen3", 2, 2, tensor=2)] == [DENSE, DENSE]


def test_experts_in_one_tensor_are_bound_where_the_rollout_stacks_them_alike(toy_dir):
    experts = DENSE | {"gate"}
    assert [kinds(names) for names in bound_by(toy_dir, "qwen3_moe", 2, 1)] == [experts, experts]


def test_a_shard_with_padding_behind_it_is_not_bound(toy_dir):
    """64 rows over three ranks are 22, 22 and 20, and no number of rows here is a multiple of three."""
    assert [kinds(names) for names in bound_by(toy_dir, "qwen3", 3, 1)] == [DENSE, DENSE, set()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rollout_tensor", "sizes"),
    [(4, 2, {}), (4, 1, {"replicas": 2}), (2, 1, {"sequence": 2}), (4, 2, {"tensor": 2})],
)
def test_other_layouts_are_bound_where_rows_allow(toy_dir, ranks, rollout_tensor, sizes):
    found = bound_by(toy_dir, "qwen3", ranks, rollout_tensor, **sizes)
    expected = DENSE if rollout_tensor == sizes.get("tensor", 1) else DENSE - {"o_proj", "down_proj"}
    assert [kinds(names) for names in found] == [expected] * ranks
