"""Hugging Face directories in pieces: what ranks write together is what transformers writes alone."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

from hybridflow.errors import EngineError
from hybridflow.models.geometry import read_geometry
from hybridflow.models.names.rules import canonical_weights, tensor_box
from hybridflow.models.shard_files import read_into, save_directory
from hybridflow.models.shard_files.writing import SavedWeight, byte_runs, index_of, plan_files
from hybridflow.parallel.boxes import slices_within
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import run_ranks


def nothing_else(directory: Path) -> None:
    """No configuration, no tokenizer."""


def empty_shards(source: Path, tensor: int, size: int, dtype: torch.dtype = torch.float32) -> list[WeightShard]:
    """What one of `size` tensor-parallel ranks holds of the model in a directory, not read yet."""
    geometry = read_geometry(source)
    layouts = {
        name: TensorLayout(spec.shape, tensor_box(spec, geometry, tensor, size))
        for name, spec in canonical_weights(geometry).items()
    }
    return [WeightShard(n, torch.full(layout.local_shape, 9.0, dtype=dtype), layout) for n, layout in layouts.items()]


def copy_in_parts(rank: int, source: Path, target: Path, sizes: dict[str, int], largest: int) -> None:
    ranks = Ranks(rank, ParallelMesh(sizes))
    shards = empty_shards(source, ranks.mesh.coordinate(rank)["tensor"], sizes["tensor"])
    read_into(source, shards)
    save_directory(shards, target, ranks, write_rest=nothing_else, largest_file_bytes=largest)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        ("llama", {"vocab_size": 70, "num_attention_heads": 4, "head_dim": 16}),
    ],
)
@pytest.mark.parametrize("sizes", [{"data": 1, "tensor": 2}, {"data": 2, "tensor": 2}], ids=["t2", "d2t2"])
def test_a_model_copied_by_several_ranks_is_the_same_file(toy_dir, tmp_path, architecture, changes, sizes):
    source = toy_dir(architecture, **changes)
    run_ranks(copy_in_parts, sizes["data"] * sizes["tensor"], source, tmp_path, sizes, 1 << 30)
    assert (tmp_path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_model_of_several_files_is_read_by_transformers(toy_dir, tmp_path):
    source = toy_dir("qwen3_moe")
    run_ranks(copy_in_parts, 2, source, tmp_path, {"data": 1, "tensor": 2}, 100_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    shards = empty_shards(tmp_path, 1, 2)
    read_into(tmp_path, shards)
    assert_holds(shards, load_file(source / "model.safetensors"))


def assert_holds(shards: list[WeightShard], weights: dict[str, torch.Tensor]) -> None:
    for shard in shards:
        whole = TensorLayout.full(shard.layout.shape).box
        expected = weights[shard.name][slices_within(shard.layout.box, whole)]
        assert torch.equal(shard.tensor, expected.to(shard.tensor.dtype)), shard.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boxes_are_read_in_the_number_format_of_the_shards(toy_dir, dtype):
    source = toy_dir("llama")
    shards = empty_shards(source, 0, 1, dtype)
    read_into(source, shards)
    assert_holds(shards, load_file(source / "model.safetensors"))


def test_views_with_strides_are_filled_and_written(tmp_path):
    save_file({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "model.safetensors")
    held = torch.zeros(4, 8)
    shard = WeightShard("w", held.t()[2:4, :3].t(), TensorLayout((3, 4), ((0, 3), (1, 3))))
    read_into(tmp_path, [shard])
    assert held[:3, 2:4].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    rest = WeightShard("w", torch.zeros(3, 1), TensorLayout((3, 4), ((0, 3), (0, 1))))
    last = WeightShard("w", torch.ones(3, 1), TensorLayout((3, 4), ((0, 3), (3, 4))))
    save_directory([shard, rest, last], tmp_path / "new", Ranks.alone(), write_rest=nothing_else)
    written = load_file(tmp_path / "new" / "model.safetensors")["w"]
    assert written.tolist() == [[0.0, 1.0, 2.0, 1.0], [0.0, 5.0, 6.0, 1.0], [0.0, 9.0, 10.0, 1.0]]


def test_the_number_format_of_a_file_may_be_another(tmp_path):
    shards = [WeightShard.full(name, torch.rand(3, 2)) for name in ("model.w", "score.weight")]
    formats = {"model.w": torch.bfloat16, "score.weight": torch.float32}
    save_directory(shards, tmp_path, Ranks.alone(), write_rest=nothing_else, dtype_of=formats.__getitem__)
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == formats
    assert torch.equal(written["model.w"], shards[0].tensor.bfloat16())


def test_a_decoder_saved_without_its_head_has_shorter_names(tmp_path):
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    shard = WeightShard.full("model.norm.weight", torch.zeros(4))
    read_into(tmp_path, [shard])
    assert shard.tensor.sum() == 4


@pytest.mark.parametrize("saved", [{}, {"score.weight": torch.ones(2, 4)}], ids=["absent", "of another shape"])
def test_a_value_head_is_zero_where_the_directory_has_none(tmp_path, saved):
    save_file({"model.norm.weight": torch.ones(4)} | saved, tmp_path / "model.safetensors")
    head = WeightShard.full("score.weight", torch.ones(1, 4))
    read_into(tmp_path, [head], zero_if_absent=("score.weight",))
    assert head.tensor.sum() == 0


@pytest.mark.parametrize(
    ("shard", "words", "remedy"),
    [
        (WeightShard.full("lm_head.weight", torch.zeros(2, 2)), "has no weight 'lm_head.weight'", "complete"),
        (WeightShard.full("model.w", torch.zeros(2, 3)), r"'model.w' has shape \(2, 2\) in", "config.json"),
    ],
)
def test_a_weight_that_is_not_there_or_of_another_shape_is_named(tmp_path, shard, words, remedy):
    save_file({"model.w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=words) as caught:
        read_into(tmp_path, [shard])
    assert remedy in caught.value.remedy


def test_a_directory_without_weights_or_with_damaged_ones_is_refused(tmp_path):
    shard = WeightShard.full("model.w", torch.zeros(2))
    with pytest.raises(EngineError, match=r"no \.safetensors files in"):
        read_into(tmp_path, [shard])
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="cannot be read"):
        read_into(tmp_path, [shard])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.w": "gone.safetensors"}}))
    with pytest.raises(EngineError, match="gone.safetensors cannot be read"):
        read_into(tmp_path, [shard])


def save_with_a_failure(rank: int, target: Path, failure: str) -> str:
    def write_rest(directory: Path) -> None:
        if failure == "rest":
            raise EngineError("the tokenizer is gone", remedy="Find it.")

    half = TensorLayout((4,), ((2 * rank, 2 * rank + 2),))
    shards = [WeightShard("model.w", torch.full((2,), float(rank)), half)]
    if failure == "hole" and rank == 1:
        shards = []
    if failure == "disk" and rank == 1:
        target = target / "nowhere"
    try:
        save_directory(shards, target, Ranks(rank, ParallelMesh({"data": 2})), write_rest=write_rest)
    except (EngineError, OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "written"


@pytest.mark.parametrize(
    ("failure", "words"),
    [("rest", "the tokenizer is gone"), ("hole", "only the boxes"), ("disk", "nowhere"), ("none", "written")],
)
def test_what_fails_on_one_rank_fails_on_all(tmp_path, failure, words):
    for answer in run_ranks(save_with_a_failure, 2, tmp_path, failure):
        assert words in answer


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw) -> TensorLayout:
    shape = draw(shapes)
    ends = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    return TensorLayout(shape, tuple((low, high) for low, high in ends))


@given(layouts())
def test_the_runs_of_a_box_are_its_elements_in_order(layout):
    whole = torch.arange(torch.Size(layout.shape).numel(), dtype=torch.int32).reshape(layout.shape)
    box = whole[tuple(slice(low, high) for low, high in layout.box)]
    runs = list(byte_runs(layout, item_bytes=4))
    elements = [index for start, count in runs for index in range(start // 4, (start + count) // 4)]
    assert elements == box.flatten().tolist()


def test_a_box_of_whole_rows_is_one_run():
    layout = TensorLayout((10, 4, 3), ((2, 7), (0, 4), (0, 3)))
    assert list(byte_runs(layout, item_bytes=2)) == [(2 * 12 * 2, 5 * 12 * 2)]


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), shapes),
        min_size=1,
    )
)
def test_a_planned_file_is_the_one_that_safetensors_writes(weights):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in weights.items()}
    names = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
    [file] = plan_files({name: SavedWeight(names[dtype], shape) for name, (dtype, shape) in weights.items()})
    written = save(tensors, metadata={"format": "pt"})
    assert written.startswith(file.header)
    assert len(written) == file.num_bytes


def test_weights_are_dealt_to_files_of_a_limited_size():
    weights = {name: SavedWeight("F32", (3,)) for name in "abcde"} | {"large": SavedWeight("F32", (100,))}
    files = plan_files(weights, largest_bytes=24)
    assert [list(file.offsets) for file in files] == [["a", "b"], ["c", "d"], ["e"], ["large"]]
    assert files[1].name == "model-00002-of-00004.safetensors"
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == 5 * 12 + 400
    assert index["weight_map"]["large"] == files[3].name
