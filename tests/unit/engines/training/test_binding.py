"""Parameters of sharded engines that live in a rollout's memory: which can, and that training stays the same."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.names.parts import Part, views
from hybridflow.models.names.rules import Place
from hybridflow.models.names.vllm import parts_of
from hybridflow.parallel.boxes import Box, slices_within
from hybridflow.parallel.layout import WeightShard
from tests.parity.divided import Case, engine_of, global_batch, loss_of, mesh_of, own_rows
from tests.spmd import preload, run_ranks
from tests.toys import logprobs_of, stepped

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOLERANCE = {
    TrainingEngine.fsdp: {"atol": 0.0, "rtol": 0.0},
    # float32: Megatron's products are one here and several there; log-probabilities are down to -30.
    TrainingEngine.megatron: {"atol": 1e-5, "rtol": 1e-6},
}


def bind_and_train(rank: int, case: Case, rollout_tensor: int, trained_first: bool) -> tuple[set[str], set[str]]:
    """The names that a rank holds and those that it bound, once every promise of `bind` has been seen to hold."""
    plain, engine, mesh = engine_of(case, rank), engine_of(case, rank), mesh_of(case)
    axis = "tensor" if mesh.axis_size("tensor") > 1 else "data"
    rollout_rank = mesh.index_along(rank, (axis,)) * rollout_tensor // mesh.axis_size(axis)
    slots = vllm_slots(read_geometry(case.directory), Place(tensor=rollout_rank, tensor_size=rollout_tensor))
    if trained_first:
        trained(engine, case, rank)
        trained(plain, case, rank)
    before = held(engine)
    names = engine.bind(slots)
    torch.testing.assert_close(held(engine), before, rtol=0, atol=0)
    called: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_fused_adamw_", "_foreach_sqrt"):
            patch.setattr(torch, name, noted(name, called))
        numbers = trained(engine, case, rank)
    assert called == {"_fused_adamw_"}, "the fused optimizer was left"
    torch.testing.assert_close(numbers, trained(plain, case, rank), **TOLERANCE[case.engine])
    torch.testing.assert_close(held(engine), held(plain), **TOLERANCE[case.engine])
    for shard in engine.weight_shards():
        if shard.name in names:
            slot = slots[shard.name]
            there = slot.tensor[slices_within(shard.layout.box, slot.layout.box)]
            assert there.data_ptr() == shard.tensor.data_ptr(), f"{shard.name} is not in its slot"
            assert torch.equal(there, shard.tensor)
            assert not torch.equal(there, before[shard.name, shard.layout.box]), f"{shard.name} was not trained"
    return {shard.name for shard in engine.weight_shards()}, names


def vllm_slots(geometry: ModelGeometry, place: Place) -> dict[str, WeightShard]:
    """The memory of a vLLM worker: fused tensors one behind the other in one storage, and the weights in them."""
    parts = {name: parts_of(name, geometry, place) for name in _vllm_names(geometry)}
    shapes = {name: _shape_of(found) for name, found in parts.items()}
    storage = torch.zeros(sum(shape.numel() for shape in shapes.values()) + 8)
    slots, start = {}, 8
    for name, found in parts.items():
        tensor = storage[start : start + shapes[name].numel()].view(shapes[name])
        start += tensor.numel()
        slots |= {shard.name: shard for shard in views(tensor, found)}
    return slots


def _vllm_names(geometry: ModelGeometry) -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if geometry.tied else ["lm_head.weight"])
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if geometry.qk_norm else []
    mlp = (
        ["mlp.gate", "mlp.experts.w13", "mlp.experts.w2"] if geometry.experts else ["mlp.gate_up_proj", "mlp.down_proj"]
    )
    for layer in range(geometry.layers):
        for module in [*norms, "self_attn.qkv_proj", "self_attn.o_proj", *mlp]:
            names.append(f"model.layers.{layer}.{module}{'_weight' if 'experts' in module else '.weight'}")
        names += [f"model.layers.{layer}.self_attn.qkv_proj.bias"] if geometry.qkv_bias else []
    return names


def _shape_of(parts: list[Part]) -> torch.Size:
    """Large enough for all parts."""
    last = parts[-1]
    begun = [index.stop if isinstance(index, slice) else index + 1 for index in last.region]
    num_slices = sum(isinstance(index, slice) for index in last.region)
    return torch.Size([*begun, *last.layout.local_shape[num_slices:]])


def noted(name: str, called: set[str]) -> Callable[..., object]:
    """torch's function of this name, which adds its name to `called`."""
    function = getattr(torch, name)

    def call(*args: object, **kwargs: object) -> object:
        called.add(name)
        return function(*args, **kwargs)

    return call


def held(engine: TrainEngine) -> dict[tuple[str, Box], Tensor]:
    return {(shard.name, shard.layout.box): shard.tensor.clone() for shard in engine.weight_shards()}


def trained(engine: TrainEngine, case: Case, rank: int) -> Tensor:
    """Two steps: gradient norms, and log-probabilities before and after each."""
    mesh, numbers = mesh_of(case), []
    for step in range(2):
        batch = global_batch(step, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        numbers += logprobs_of(engine, rows).values.tolist()
        numbers.append(stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value)
        numbers += logprobs_of(engine, rows).values.tolist()
    return torch.tensor(numbers)


def kinds(names: set[str]) -> set[str]:
    """Names without the numbers of layers and experts, and without what all have."""
    return {re.sub(r"(model|layers|experts|self_attn|mlp|weight)\.?|\d+\.", "", name).strip(".") for name in names}


DENSE = {
    *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
BY_ROWS = DENSE - {"o_proj", "down_proj"}


@pytest.mark.parametrize(
    ("architecture", "ranks", "rollout_tensor", "sizes", "expected"),
    [
        pytest.param("qwen3", 2, 1, {}, [DENSE] * 2, id="two shards are rows of a whole rollout"),
        pytest.param("qwen3", 2, 2, {}, [BY_ROWS] * 2, id="columns of a divided rollout are not bound"),
        pytest.param("qwen3", 2, 2, {"tensor": 2}, [DENSE] * 2, id="columns divided by both are bound"),
        pytest.param("qwen3_moe", 2, 1, {}, [DENSE | {"gate"}] * 2, id="experts are stacked the same way"),
        # 64 rows over three ranks are 22, 22 and 20: FSDP pads the last rank's.
        pytest.param("qwen3", 3, 1, {}, [DENSE, DENSE, set()], id="a padded shard is not bound"),
        pytest.param("qwen3", 4, 2, {}, [BY_ROWS] * 4, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, 1, {"replicas": 2}, [DENSE] * 4, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, 1, {"sequence": 2}, [DENSE] * 2, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, 2, {"tensor": 2}, [DENSE] * 4, marks=pytest.mark.slow),
    ],
)
def test_fsdp_binds_whole_rows_of_a_slot(toy_dir, architecture, ranks, rollout_tensor, sizes, expected):
    case = Case(toy_dir(architecture, tie_word_embeddings=True, **HEADS), ranks, TrainingEngine.fsdp, sizes)
    assert [kinds(bound) for _, bound in run_ranks(bind_and_train, ranks, case, rollout_tensor, False)] == expected


@pytest.mark.megatron
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
def test_megatron_binds_all_weights_to_a_rollout_as_wide_or_narrower(
    toy_dir, architecture, ranks, sizes, rollout_tensor
):
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", num_hidden_layers=4, **HEADS)
    case = Case(directory, ranks, TrainingEngine.megatron, sizes)
    for held_names, bound in run_ranks(bind_and_train, ranks, case, rollout_tensor, sizes == {}):
        assert bound == held_names


@pytest.mark.megatron
def test_megatron_does_not_bind_what_a_wider_rollout_divides_further(toy_dir):
    case = Case(toy_dir("llama", **HEADS), 2, TrainingEngine.megatron, {})
    for held_names, bound in run_ranks(bind_and_train, 2, case, 2, False):
        assert bound == {name for name in held_names if "norm" in name}
