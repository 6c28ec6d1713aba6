"""Layouts that a model cannot have are refused in the configuration's words."""

import pytest
from transformers import Gemma2Config

from hybridflow.config.parallelism import Parallelism
from hybridflow.engines.training.fsdp.tensor_plan import check_layout
from hybridflow.errors import EngineError

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("architecture", "sizes", "reason"),
    [
        ("llama", {"tensor": 3}, "parallelism.tensor=3 does not divide the model's 4 attention heads"),
        ("llama", {"tensor": 4}, "parallelism.tensor=4 does not divide the model's 2 key-value heads"),
        ("qwen3_moe", {"tensor": 2}, "parallelism.tensor=2 with engine=fsdp divides no experts"),
        ("qwen2", {"tensor": 2, "sequence": 4}, "parallelism.sequence=4 does not divide the 2 attention heads of a"),
    ],
)
def test_sizes_that_do_not_divide_the_model(toy_dir, architecture, sizes, reason):
    with pytest.raises(EngineError) as caught:
        check_layout(toy_dir(architecture, **HEADS), Parallelism(**sizes))
    assert reason in caught.value.message
    assert "leave parallelism.tensor and parallelism.sequence out" in caught.value.remedy


def test_sizes_that_divide_it(toy_dir):
    for sizes in ({"tensor": 2}, {"sequence": 4}, {"tensor": 2, "sequence": 2}):
        check_layout(toy_dir("qwen3", **HEADS), Parallelism(**sizes))


def test_any_model_is_held_in_shards(tmp_path):
    Gemma2Config(num_hidden_layers=1).save_pretrained(tmp_path)
    check_layout(tmp_path, Parallelism(replicas=2))
    with pytest.raises(EngineError, match="gemma2"):
        check_layout(tmp_path, Parallelism(tensor=2))
