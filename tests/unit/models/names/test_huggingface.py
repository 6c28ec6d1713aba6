"""Parameters of real models in transformers, cut into canonical weights, are what transformers writes to disk."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.models.geometry import read_geometry
from hybridflow.models.heads import ValueModel, save_value_model
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.models.names.rules import canonical_weights
from tests.toys import ARCHITECTURES, toy_model

EXPERTS, ROWS, COLUMNS = 3, 4, 5


def shards_of(model: torch.nn.Module) -> dict:
    shards = [
        shard for name, tensor in model.named_parameters() for shard in views(tensor, parts_of(name, tensor.shape))
    ]
    assert len({shard.name for shard in shards}) == len(shards)
    return {shard.name: shard for shard in shards}


def assert_those_of_the_file(model: torch.nn.Module, directory: Path, head: str = "language") -> None:
    """The weights of the model are those of the file it was saved to, and have the shapes that the rules give."""
    shards, saved = shards_of(model), load_file(directory / "model.safetensors")
    assert shards.keys() == saved.keys()
    for name, shard in shards.items():
        assert shard.layout.local_shape == shard.layout.shape
        assert torch.equal(shard.tensor, saved[name]), name
    specs = canonical_weights(read_geometry(directory), head)
    assert {name: spec.shape for name, spec in specs.items()} == {n: s.layout.shape for n, s in shards.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_weights_of_a_model_are_those_of_its_file_and_of_the_rules(architecture, tied, tmp_path):
    biased = {"attention_bias": True} if architecture == "llama" else {}
    model = toy_model(architecture, tie_word_embeddings=tied, **biased)
    model.save_pretrained(tmp_path)
    assert_those_of_the_file(model, tmp_path)


def test_the_weights_of_a_value_model_are_those_of_its_file_and_of_the_rules(toy_dir, tmp_path):
    model = ValueModel(toy_model("qwen3_moe").model)
    save_value_model(model, tmp_path, tokenizer_from=toy_dir("qwen3_moe"))
    assert_those_of_the_file(model, tmp_path, "value")


@st.composite
def boxes(draw, shape: tuple[int, ...]):
    ends = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    return tuple((low, high) for low, high in ends)


@pytest.mark.parametrize(
    ("name", "shape"), [("gate_up_proj", (EXPERTS, 2 * ROWS, COLUMNS)), ("down_proj", (EXPERTS, ROWS, COLUMNS))]
)
@given(data=st.data())
def test_a_piece_of_stacked_experts_holds_pieces_of_their_weights(name, shape, data):
    box = data.draw(boxes(shape))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    piece = whole[tuple(slice(low, high) for low, high in box)]
    parameter = f"model.layers.0.mlp.experts.{name}"
    expected = {shard.name: shard.tensor for shard in views(whole, parts_of(parameter, shape))}
    found = views(piece, parts_of(parameter, shape, box))
    for shard in found:
        region = tuple(slice(low, high) for low, high in shard.layout.box)
        assert torch.equal(shard.tensor, expected[shard.name][region])
    assert sum(shard.tensor.numel() for shard in found) == piece.numel()


def test_the_views_share_the_memory_of_the_parameter():
    tensor = torch.zeros(2, 6, 4)
    [shard] = [s for s in views(tensor, parts_of("m.experts.gate_up_proj", (2, 6, 4))) if "1.up_proj" in s.name]
    shard.tensor.fill_(1.0)
    assert tensor.sum() == tensor[1, 3:].sum() == 12
