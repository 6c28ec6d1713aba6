"""The padding token's embedding gets no gradient as an input on any engine, wherever the token stands in a text."""

import pytest

from hybridflow.config.training import TrainingEngine
from tests.parity.divided import Case, assert_equal, train
from tests.spmd import preload

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
FSDP, MEGATRON = TrainingEngine.fsdp, TrainingEngine.megatron
LAYOUTS = [
    ("llama", 2, FSDP, {}),
    ("llama", 2, FSDP, {"tensor": 2}),
    ("qwen3", 2, FSDP, {"sequence": 2}),
    pytest.param("qwen3", 2, MEGATRON, {"tensor": 2}, marks=pytest.mark.megatron),
    pytest.param("llama", 2, MEGATRON, {"tensor": 2, "sequence_parallel": True}, marks=pytest.mark.megatron),
    pytest.param("llama", 2, MEGATRON, {"pipeline": 2}, marks=pytest.mark.megatron),
]

preload("hybridflow.engines.training.fsdp.engine")


@pytest.fixture
def case_of(toy_dir):
    def made(architecture: str, *layout) -> Case:
        directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)
        return Case(directory, *layout, steps=3, with_padding=True)

    return made


@pytest.mark.parametrize(("architecture", "ranks", "engine", "sizes"), LAYOUTS)
def test_a_padding_token_among_the_others_trains_alike_on_every_engine(
    case_of, plain, architecture, ranks, engine, sizes
):
    case = case_of(architecture, ranks, engine, sizes)
    assert_equal(train(case), plain(case))


def test_its_row_stays_as_it_is_unless_it_is_the_heads_too(case_of):
    """transformers begins it with zeros; a tied row learns what the head learns."""
    for architecture, is_tied in (("llama", False), ("qwen3", True)):
        row = train(case_of(architecture)).weights["model.embed_tokens.weight"][0]
        assert bool((row == 0.0).all()) is not is_tied
