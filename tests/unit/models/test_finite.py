"""Weights that are not finite are refused when they are read, by name."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import EngineError
from hybridflow.models.heads import load_value_model
from hybridflow.models.loading import check_finite, load_causal_lm
from hybridflow.models.shard_files import read_into
from hybridflow.parallel.layout import WeightShard

NAME = "model.layers.1.mlp.down_proj.weight"
LOAD = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(params=[math.nan, -math.inf])
def poisoned(request, toy_dir, tmp_path):
    """A model one of whose elements is not finite."""
    shutil.copytree(toy_dir(), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights[NAME][3, 5] = request.param
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def test_a_model_is_refused_by_each_way_of_reading_it(poisoned):
    shard = WeightShard.full(NAME, torch.empty(64, 128))
    for read in (
        lambda: load_causal_lm(poisoned, **LOAD),
        lambda: load_value_model(poisoned, **LOAD),
        lambda: read_into(poisoned, [shard]),
    ):
        with pytest.raises(EngineError, match=r"down_proj\.weight' in .* is not finite") as caught:
            read()
        assert "use other weights" in caught.value.remedy


def test_what_is_finite_or_no_float_passes(tmp_path):
    for tensor in (torch.tensor([3e38, -3e38]), torch.empty(0), torch.tensor([1 << 40]), torch.empty(2, device="meta")):
        check_finite("w", tensor, tmp_path)
    check_finite("w", torch.tensor([6e4], dtype=torch.float16), tmp_path)
    with pytest.raises(EngineError, match="'w'"):
        check_finite("w", torch.tensor([1.0, math.inf], dtype=torch.bfloat16), tmp_path)
