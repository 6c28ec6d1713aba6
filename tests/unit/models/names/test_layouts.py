"""What divides a model and what does not, said in the words of its configuration."""

import pytest

from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.models.names.layouts import WeightDivision, layout_problem
from tests.unit.models.names.examples import geometry

ENGINES = {
    "plain": WeightDivision(),
    "shards": WeightDivision(divides_experts=False),
    "stages": WeightDivision(needs_known_names=True, has_equal_stages=True),
    "rollout": WeightDivision(repeats_kv_heads=True, divides_vocabulary_evenly=True),
}


@pytest.mark.parametrize(
    ("engine", "changes", "sizes", "words"),
    [
        ("shards", {}, {"tensor": 3}, "parallelism.tensor=3 does not divide the model's 8 attention heads"),
        ("stages", {}, {"tensor": 4}, "tensor=4 does not divide the model's 2 key-value heads"),
        ("rollout", {"num_key_value_heads": 8, "intermediate_size": 90}, {"tensor": 4}, "intermediate size, 90"),
        (
            "rollout",
            {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 64},
            {"tensor": 3},
            "vocabulary",
        ),
        ("stages", {}, {"pipeline": 3}, "pipeline=3 does not divide the model's 4 layers"),
        ("stages", {}, {"pipeline": 2, "virtual_pipeline": 4}, "pipeline=2 times virtual_pipeline=4 does not divide"),
        ("rollout", {}, {"pipeline": 5}, "pipeline=5 is more than the model's 4 layers"),
        ("stages", {}, {"expert": 2}, "expert=2 divides experts, and the model has none"),
        ("stages", {"model_type": "qwen3_moe"}, {"expert": 4}, "expert=4 does not divide the model's 6 experts"),
        ("shards", {"model_type": "qwen3_moe"}, {"tensor": 2}, "tensor=2 cannot divide the model's experts"),
        ("shards", {}, {"sequence": 3}, "parallelism.sequence=3 does not divide the 8 attention heads"),
        ("shards", {}, {"tensor": 2, "sequence": 8}, "sequence=8 does not divide the 4 attention heads of a tensor"),
        ("shards", {"num_attention_heads": 18, "num_key_value_heads": 3}, {"sequence": 2}, "=2 neither divides"),
        ("stages", {"model_type": "gemma2"}, {}, "divides models of the types llama, "),
    ],
)
def test_a_size_that_does_not_fit_is_named_with_what_it_should_divide(engine, changes, sizes, words):
    model = geometry(**({"model_type": "llama"} | changes))
    assert words in str(layout_problem(model, ENGINES[engine], _parallelism(engine, sizes)))


@pytest.mark.parametrize(
    ("engine", "changes", "sizes"),
    [
        ("plain", {"model_type": "gemma2"}, {}),
        ("shards", {}, {"tensor": 2, "sequence": 4}),
        ("stages", {}, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
        ("stages", {"model_type": "qwen3_moe"}, {"tensor": 2, "expert": 3}),
        ("rollout", {}, {"tensor": 8}),
        ("rollout", {}, {"tensor": 4, "pipeline": 3}),
    ],
)
def test_sizes_that_fit_are_no_problem(engine, changes, sizes):
    model = geometry(**({"model_type": "llama"} | changes))
    assert layout_problem(model, ENGINES[engine], _parallelism(engine, sizes)) is None


def _parallelism(engine, sizes):
    return RolloutParallelism(**sizes) if engine == "rollout" else Parallelism(**sizes)
