"""What divides a model and what does not, said in the words of its configuration."""

import pytest

from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.models.names.layouts import layout_problem
from tests.unit.models.names.examples import geometry


@pytest.mark.parametrize(
    ("engine", "changes", "sizes", "words"),
    [
        ("fsdp", {}, {"tensor": 3}, "parallelism.tensor=3 does not divide the model's 8 attention heads"),
        ("megatron", {}, {"tensor": 4}, "tensor=4 does not divide the model's 2 key-value heads"),
        ("vllm", {"num_key_value_heads": 8, "intermediate_size": 90}, {"tensor": 4}, "intermediate size, 90"),
        ("vllm", {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 64}, {"tensor": 3}, "vocabulary"),
        ("megatron", {}, {"pipeline": 3}, "pipeline=3 does not divide the model's 4 layers"),
        ("megatron", {}, {"pipeline": 2, "virtual_pipeline": 4}, "pipeline=2 times virtual_pipeline=4 does not divide"),
        ("vllm", {}, {"pipeline": 5}, "pipeline=5 is more than the model's 4 layers"),
        ("megatron", {}, {"expert": 2}, "expert=2 divides experts, and the model has none"),
        ("megatron", {"model_type": "qwen3_moe"}, {"expert": 4}, "expert=4 does not divide the model's 6 experts"),
        ("fsdp", {"model_type": "qwen3_moe"}, {"tensor": 2}, "tensor=2 with engine=fsdp divides no experts"),
        ("fsdp", {}, {"sequence": 3}, "parallelism.sequence=3 does not divide the 8 attention heads"),
        ("fsdp", {}, {"tensor": 2, "sequence": 8}, "sequence=8 does not divide the 4 attention heads of a tensor"),
        ("fsdp", {"num_attention_heads": 18, "num_key_value_heads": 3}, {"sequence": 2}, "sequence=2 neither divides"),
        ("megatron", {"model_type": "gemma2"}, {}, "engine=megatron knows the weights of llama, "),
    ],
)
def test_a_size_that_does_not_fit_is_named_with_what_it_should_divide(engine, changes, sizes, words):
    model = geometry(**({"model_type": "llama"} | changes))
    assert words in str(layout_problem(model, engine, _parallelism(engine, sizes)))


@pytest.mark.parametrize(
    ("engine", "changes", "sizes"),
    [
        ("single", {"model_type": "gemma2"}, {}),
        ("fsdp", {}, {"tensor": 2, "sequence": 4}),
        ("megatron", {}, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
        ("megatron", {"model_type": "qwen3_moe"}, {"tensor": 2, "expert": 3}),
        ("vllm", {}, {"tensor": 8}),
        ("vllm", {}, {"tensor": 4, "pipeline": 3}),
    ],
)
def test_sizes_that_fit_are_no_problem(engine, changes, sizes):
    assert layout_problem(geometry(**({"model_type": "llama"} | changes)), engine, _parallelism(engine, sizes)) is None


def _parallelism(engine, sizes):
    return RolloutParallelism(**sizes) if engine == "vllm" else Parallelism(**sizes)
