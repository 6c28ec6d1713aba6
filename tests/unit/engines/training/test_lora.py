"""The single engine with a low-rank adapter: what moves, what is sent, what is kept."""

import peft
import pytest
import torch
from transformers import AutoModelForTokenClassification

from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora
from hybridflow.errors import CheckpointError
from hybridflow.models.adapters.files import merged_directory
from hybridflow.models.adapters.lora import is_adapter_weight
from hybridflow.models.heads import load_value_model
from hybridflow.parallel.layout import WeightShard
from tests.toys import logprobs_of, sequences, stepped, values_of
from tests.unit.engines.training.engines import (
    language_engine,
    largest_difference,
    likelihood_loss,
    squared_loss,
    value_engine,
    weights,
    with_returns,
)

LORA = Lora(rank=4, alpha=8.0)


def trained(directory, steps: int = 3, **settings):
    engine = language_engine(directory, **({"lora": LORA} | settings))
    for seed in range(steps):
        stepped(engine, sequences(seed=seed), likelihood_loss)
    return engine


def sent(engine) -> dict[str, torch.Tensor]:
    """What the rollout gets."""
    return {shard.name: shard.tensor.clone() for shard in engine.weight_shards()}


def logprobs(engine, **options) -> torch.Tensor:
    return logprobs_of(engine, sequences(seed=9), **options).values


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *(
            (language_engine, settings)
            for settings in ({}, {"gradient_checkpointing": True}, {"microbatch_tokens": 20})
        ),
        (value_engine, {}),
    ],
)
def test_only_the_adapter_and_a_value_models_head_move_and_the_loss_falls(toy_dir, make, settings):
    engine, loss = make(toy_dir(), lora=LORA, **settings), likelihood_loss if make is language_engine else squared_loss
    before = weights(engine)
    losses = [stepped(engine, with_returns(), loss)["loss"].value for _ in range(8)]
    assert losses[-1] < (0.7 if make is language_engine else 0.9) * losses[0]
    for name, weight in weights(engine).items():
        assert torch.equal(weight, before[name]) != ("lora_" in name or name.startswith("score.")), name


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_the_optimizer_keeps_state_and_float32_copies_of_the_adapter_alone(toy_dir, dtype):
    engine = trained(toy_dir(), 1, dtype=dtype)
    adapter = sum(weight.numel() for name, weight in weights(engine).items() if "lora_" in name)
    assert sum(state["exp_avg"].numel() for state in engine.optimizer.state.values()) == adapter
    assert sum(copy.numel() for copy in engine.optimizer.weight_of) == (adapter if dtype is Dtype.bfloat16 else 0)


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen2", True), ("qwen3_moe", False)])
def test_without_its_adapter_the_model_is_the_one_it_began_as(toy_dir, architecture, tied):
    directory = toy_dir(architecture, tie_word_embeddings=tied)
    engine, base = trained(directory), language_engine(directory)
    assert torch.equal(logprobs(engine, adapted=False), logprobs(base))
    assert (logprobs(engine) - logprobs(base)).abs().max() > 0.1
    stepped(engine, sequences(), likelihood_loss)
    assert torch.equal(logprobs(engine, adapted=False), logprobs(base))


def test_asking_without_the_adapter_first_does_not_stop_it_from_learning(toy_dir):
    asked, plain = language_engine(toy_dir(), lora=LORA), language_engine(toy_dir(), lora=LORA)
    logprobs(asked, adapted=False)
    for engine in (asked, plain):
        stepped(engine, sequences(), likelihood_loss)
    assert largest_difference(weights(asked), weights(plain)) == 0.0


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)])
def test_a_plain_model_with_the_weights_sent_says_the_same(toy_dir, architecture, tied):
    directory = toy_dir(architecture, tie_word_embeddings=tied)
    engine, plain = trained(directory), language_engine(directory)
    merged = sent(engine)
    assert not any(is_adapter_weight(name) for name in merged)
    for shard in plain.weight_shards():
        shard.tensor.copy_(merged.pop(shard.name))
    assert not merged
    # float32 products in another order, through two layers.
    assert torch.allclose(logprobs(plain), logprobs(engine), atol=2e-5)


def test_frozen_weights_are_bound_and_adapted_ones_are_not(toy_dir):
    engine = trained(toy_dir(), lora=Lora(rank=4, targets=["q_proj", "up_proj"]))
    before = sent(engine)
    slots = {name: WeightShard.full(name, torch.zeros_like(tensor)) for name, tensor in before.items()}
    bound = engine.bind(slots)
    assert bound == {name for name in slots if not ("q_proj" in name or "up_proj" in name)}
    for shard in engine.weight_shards():
        assert torch.equal(shard.tensor, before[shard.name])
        assert (shard.tensor.data_ptr() == slots[shard.name].tensor.data_ptr()) == (shard.name in bound)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_training_goes_on_bit_for_bit_from_a_small_checkpoint(toy_dir, tmp_path, dtype):
    engine = trained(toy_dir(), 2, dtype=dtype)
    engine.save(tmp_path)
    assert not (tmp_path / "huggingface").exists()
    adapter = sum(weight.nbytes for name, weight in weights(engine).items() if "lora_" in name)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < adapter + 8000  # names and shapes
    again = language_engine(toy_dir(), lora=LORA, dtype=dtype)
    again.load(tmp_path)
    assert largest_difference(weights(again), weights(engine)) == 0.0
    for other in (engine, again):
        stepped(other, sequences(seed=2), likelihood_loss)
    assert largest_difference(weights(again), weights(engine)) == 0.0


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("make", [language_engine, value_engine])
def test_a_snapshot_has_no_frozen_weights_and_is_restored_bit_for_bit_in_a_new_engine(toy_dir, make, dtype):
    loss = likelihood_loss if make is language_engine else squared_loss
    engine, other = make(toy_dir(), lora=LORA, dtype=dtype), make(toy_dir(), lora=LORA, dtype=dtype)
    stepped(engine, with_returns(0), loss)
    kept = engine.snapshot()
    stepped(engine, with_returns(1), loss)
    wanted = weights(engine)
    for each in (engine, other):
        each.roll_back(kept)
        stepped(each, with_returns(1), loss)
        assert largest_difference(weights(each), wanted) == 0.0
    frozen = sum(weight.nbytes for name, weight in wanted.items() if "lora_" not in name)
    assert len(kept.data) < frozen, "weights, moments and copies of a small adapter"


@pytest.mark.parametrize(("dtype", "other"), [(Dtype.float32, Dtype.bfloat16), (Dtype.bfloat16, Dtype.float32)])
def test_a_checkpoint_is_read_in_another_number_format(toy_dir, tmp_path, dtype, other):
    engine = trained(toy_dir(), 2, dtype=dtype)
    engine.save(tmp_path)
    again = language_engine(toy_dir(), lora=LORA, dtype=other)
    again.load(tmp_path)
    exact = {
        weight: copy for copy, weight in (engine if dtype is Dtype.bfloat16 else again).optimizer.weight_of.items()
    }
    pairs = zip(engine.model.parameters(), again.model.parameters(), strict=True)
    for ours, theirs in [pair for pair in pairs if pair[0].requires_grad]:
        assert torch.equal(exact.get(ours, ours), exact.get(theirs, theirs))


def test_a_run_without_an_adapter_does_not_resume_one_that_had_it_nor_the_other_way_round(toy_dir, tmp_path):
    trained(toy_dir(), 1).save(tmp_path / "with")
    language_engine(toy_dir()).save(tmp_path / "without")
    with pytest.raises(CheckpointError, match="has no adapter"):
        language_engine(toy_dir(), lora=LORA).load(tmp_path / "without")
    with pytest.raises(CheckpointError, match="lora.rank=8"):
        language_engine(toy_dir(), lora=Lora(rank=8, alpha=8.0)).load(tmp_path / "with")


def test_a_value_models_adapter_is_one_for_token_classification(toy_dir, tmp_path):
    engine = value_engine(toy_dir(), lora=LORA)
    for seed in range(3):
        stepped(engine, with_returns(seed), squared_loss)
    engine.save(tmp_path)
    again = value_engine(toy_dir(), lora=LORA)
    again.load(tmp_path)
    assert largest_difference(weights(again), weights(engine)) == 0.0
    batch = sequences((5,), (4,))
    ids = torch.cat([batch.tokens("prompt_ids").values, batch.tokens("response_ids").values])
    values = values_of(engine, batch).values

    classifier = AutoModelForTokenClassification.from_pretrained(toy_dir(), num_labels=1)
    theirs = peft.PeftModel.from_pretrained(classifier, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = theirs(ids[None]).logits[0, :, 0]
    assert torch.allclose(logits[4:-1], values, atol=1e-5)

    merged_directory(tmp_path / "adapter", toy_dir(), tmp_path / "merged")
    model = load_value_model(tmp_path / "merged", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        assert torch.allclose(model(ids[None])[0, 4:-1], values, atol=1e-5)
