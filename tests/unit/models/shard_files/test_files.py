"""Where the bytes of a weight are in a file, against safetensors itself."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from hybridflow.models.shard_files.files import SavedWeight, byte_runs, index_of, plan_files
from hybridflow.parallel.layout import TensorLayout

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
