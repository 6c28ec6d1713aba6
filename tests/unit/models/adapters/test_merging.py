"""Merged weights: the sums of a model's and its adapter's, whatever part is asked for."""

import peft
import pytest
import torch

from hybridflow.config.training import Lora
from hybridflow.models.adapters.files import plan_adapter
from hybridflow.models.adapters.merging import TILE_COLUMNS, TILE_ROWS, MergedShard, merged_shards
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import TensorLayout, WeightShard
from tests.toys import toy_model
from tests.unit.models.adapters.adapted import adapted, shards_of


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_are_pefts(tmp_path, tied):
    model = toy_model("qwen2", tie_word_embeddings=tied)
    adapter = adapted(model, Lora(rank=4, alpha=12.0))
    plan_adapter(adapter, shards_of(model), tmp_path, Ranks.alone(), base_model="toy").write()
    theirs = peft.PeftModel.from_pretrained(toy_model("qwen2", tie_word_embeddings=tied), str(tmp_path))
    merged = dict(theirs.merge_and_unload().named_parameters())
    ours = {shard.name: shard.tensor for shard in merged_shards(shards_of(model), adapter)}
    assert ours.keys() == merged.keys()
    # float32 sums of four products, in another order.
    assert max(float((ours[name] - merged[name]).detach().abs().max()) for name in ours) < 1e-6
    assert (ours["model.layers.0.self_attn.q_proj.weight"] - merged["model.norm.weight"]).abs().max() > 0.1


def test_weights_without_an_addition_are_views():
    model = toy_model("llama")
    adapter = adapted(model, Lora(rank=2, targets=["q_proj"]))
    for shard in merged_shards(shards_of(model), adapter):
        assert isinstance(shard, MergedShard) == ("q_proj" in shard.name)
        if "q_proj" not in shard.name:
            assert shard.tensor.data_ptr() in {p.data_ptr() for p in model.parameters()}, shard.name


def test_a_part_of_a_merged_weight_has_the_bits_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    rows, columns = TILE_ROWS + 70, TILE_COLUMNS + 33
    layout = TensorLayout((3 * rows, columns), ((100, 100 + rows), (0, columns)))
    base, up, down = (torch.randn(shape, generator=generator) for shape in ((rows, columns), (rows, 7), (7, columns)))
    shard = MergedShard(WeightShard("w", base, layout), up, down, 0.3)
    whole = shard.tensor
    assert torch.allclose(whole, base + 0.3 * up @ down, atol=1e-5)
    for (top, bottom), (left, right) in [
        ((0, rows), (0, columns)),
        ((3, 4), (0, columns)),
        ((TILE_ROWS - 1, TILE_ROWS + 1), (TILE_COLUMNS - 2, TILE_COLUMNS + 5)),
        ((500, 560), (17, 18)),
        ((TILE_ROWS, rows), (TILE_COLUMNS, columns)),
        ((5, 5), (0, columns)),
    ]:
        part = shard.part(((100 + top, 100 + bottom), (left, right)))
        assert torch.equal(part, whole[top:bottom, left:right])


def test_merged_bfloat16_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    base, up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in ((40, 30), (40, 4), (4, 30)))
    merged = MergedShard(WeightShard.full("w", base), up, down, 0.01).tensor
    exact = base.double() + 0.01 * up.double() @ down.double()
    assert merged.dtype is torch.bfloat16
    assert torch.equal(merged, exact.float().bfloat16())
