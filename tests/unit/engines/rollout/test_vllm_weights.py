import pytest
import torch
from torch import nn

from hybridflow.engines.rollout.vllm.weights import rank_layouts, slots_of, whole_parts
from hybridflow.errors import EngineError
from hybridflow.models.names.rules import canonical_weights
from hybridflow.parallel.boxes import are_disjoint, uncovered
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.parallel.mesh import ParallelMesh
from tests.unit.models.names.examples import geometry


class Fused(nn.Module):
    """Parameters as vLLM lays out one layer of Qwen2: queries, keys and values together, a padded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(64, 8)
        self.model.self_attn = nn.Module()
        self.model.self_attn.qkv_proj = nn.Linear(8, 16)
        self.model.mlp = nn.Module()
        self.model.mlp.gate_up_proj = nn.Linear(8, 12, bias=False)
        self.model.norm = nn.LayerNorm(8, bias=False)


SHAPES = {
    "model.embed_tokens.weight": torch.Size([60, 8]),
    "model.self_attn.q_proj.weight": torch.Size([8, 8]),
    "model.self_attn.k_proj.weight": torch.Size([4, 8]),
    "model.self_attn.v_proj.weight": torch.Size([4, 8]),
    "model.self_attn.q_proj.bias": torch.Size([8]),
    "model.self_attn.k_proj.bias": torch.Size([4]),
    "model.self_attn.v_proj.bias": torch.Size([4]),
    "model.mlp.gate_proj.weight": torch.Size([6, 8]),
    "model.mlp.up_proj.weight": torch.Size([6, 8]),
    "model.norm.weight": torch.Size([8]),
}


def whole_slots(model: nn.Module, shapes: dict[str, torch.Size]) -> dict[str, WeightShard]:
    return slots_of(model, whole_parts(shapes), {name: TensorLayout.full(shape) for name, shape in shapes.items()})


def test_slots_are_writable_views_of_the_rows_of_fused_tensors():
    model = Fused()
    slots = whole_slots(model, SHAPES)
    assert {name: slot.tensor.shape for name, slot in slots.items()} == SHAPES
    for number, slot in enumerate(slots.values()):
        slot.tensor.fill_(number)
    names = list(slots)
    attention = [names.index(f"model.self_attn.{part}_proj.weight") for part in "qkv"]
    rows = model.model.self_attn.qkv_proj.weight[:, 0].tolist()
    assert rows == [attention[0]] * 8 + [attention[1]] * 4 + [attention[2]] * 4
    assert model.model.norm.weight[0] == names.index("model.norm.weight")


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        (SHAPES | {"model.extra.weight": torch.Size([2])}, "no place for 1 weights, first 'model.extra.weight'"),
        ({name: shape for name, shape in SHAPES.items() if "norm" not in name}, "'model.norm.weight' of shape"),
        (SHAPES | {"model.mlp.up_proj.weight": torch.Size([5, 8])}, "has 96 elements, the weights in it have 88"),
        (SHAPES | {"model.norm.weight": torch.Size([7])}, "has 8 elements, the weights in it have 7"),
        (SHAPES | {"model.mlp.up_proj.weight": torch.Size([6, 7])}, "does not hold 'model.mlp.up_proj.weight'"),
        (SHAPES | {"model.mlp.up_proj.weight": torch.Size([7, 8])}, "does not hold 'model.mlp.up_proj.weight'"),
    ],
)
def test_a_model_that_is_not_covered_exactly_is_refused_by_name(shapes, word):
    with pytest.raises(EngineError, match=word) as caught:
        whole_slots(Fused(), shapes)
    assert "rollout.engine=transformers" in caught.value.remedy


GEOMETRY = geometry("qwen3_moe", num_hidden_layers=5, num_experts=3)


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (5, 8)])
def test_the_ranks_of_a_replica_hold_the_model_together_and_what_is_divided_once(pipeline, tensor):
    """With more tensor ranks than key-value heads, neighbors hold the same head; norms and routers are on all."""
    axes = {"data": 2, "pipeline": pipeline, "micro_pipeline": 2, "tensor": tensor, "micro_tensor": 2}
    mesh = ParallelMesh(axes)
    for number, replica in enumerate(mesh.subgroups(("pipeline", "tensor"))):
        held = [rank_layouts(GEOMETRY, mesh, rank) for rank in replica]
        for name, spec in canonical_weights(GEOMETRY).items():
            boxes = [layouts[name].box for layouts in held if name in layouts]
            assert not uncovered(TensorLayout.full(spec.shape).box, boxes), (number, name)
            distinct = set(boxes)
            assert are_disjoint(sorted(distinct))
            repeats = len(boxes) // len(distinct)
            is_kv = tensor > 2 and ("k_proj" in name or "v_proj" in name)
            whole = tensor if "norm" in name or ".gate." in name else 1
            assert repeats == (tensor // 2 if is_kv else whole), name
