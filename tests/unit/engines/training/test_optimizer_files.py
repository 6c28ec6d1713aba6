"""AdamW's state comes back from files whatever the number format, and training goes on as if nothing had happened."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config

from hybridflow.config.model import Dtype
from hybridflow.config.training import Optimizer
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer
from hybridflow.engines.training.state_files import load_optimizer, save_optimizer, save_weights
from hybridflow.errors import EngineError
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from recipes.tiny_calculator import make_tokenizer
from tests.toys import sequences, stepped
from tests.unit.engines.training.engines import language_engine, largest_difference, likelihood_loss, weights

SMALL_STEPS = Optimizer(learning_rate=1e-4)


def adamw(model: nn.Module) -> MasterAdamW:
    return make_optimizer([*model.parameters()], SMALL_STEPS)


def trained(model: nn.Module):
    for name, parameter in model.named_parameters():
        yield parameter, lambda tensor, name=name: [WeightShard.full(name, tensor)]


def step(model: nn.Module, optimizer: MasterAdamW) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()


def test_the_float32_copies_are_part_of_the_state(tmp_path):
    one, other = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()
    first, second = adamw(one), adamw(other)
    for _ in range(3):
        step(one, first)
    other.load_state_dict(one.state_dict())
    save_optimizer(tmp_path, first, trained(one), 3, Ranks.alone())
    assert load_optimizer(tmp_path, second, trained(other), Ranks.alone()) == 3
    for _ in range(20):
        step(one, first)
        step(other, second)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("steps", [0, 3])
def test_float32_weights_saved_are_the_copies_of_a_bfloat16_engine(tmp_path, steps):
    full, halved = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    first, second = (
        adamw(full),
        adamw(halved),
    )
    for _ in range(steps):
        step(full, first)
    shards = [WeightShard.full(name, parameter.detach()) for name, parameter in full.named_parameters()]
    save_weights(tmp_path, shards, Ranks.alone(), write_rest=lambda _: None)
    save_optimizer(tmp_path, first, trained(full), steps, Ranks.alone())
    load_optimizer(tmp_path, second, trained(halved), Ranks.alone())
    copies = {weight: copy for copy, weight in second.weight_of.items()}
    assert torch.equal(copies[halved.weight], full.weight)
    assert torch.equal(copies[halved.bias], full.bias)


def test_a_float32_engine_takes_the_copies_of_a_bfloat16_one(tmp_path):
    full, halved = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    first, second = (
        adamw(halved),
        adamw(full),
    )
    step(halved, first)
    save_optimizer(tmp_path, first, trained(halved), 1, Ranks.alone())
    load_optimizer(tmp_path, second, trained(full), Ranks.alone())
    copies = {weight: copy for copy, weight in first.weight_of.items()}
    assert torch.equal(full.weight, copies[halved.weight])
    assert not torch.equal(full.weight, halved.weight.float())


@pytest.mark.parametrize("dtype", Dtype)
def test_an_engine_over_experts_goes_on_the_same_from_a_checkpoint(toy_dir, tmp_path, dtype):
    engine = language_engine(toy_dir("qwen3_moe"), dtype=dtype)
    stepped(engine, sequences(), likelihood_loss)
    engine.save(tmp_path)
    again = language_engine(toy_dir("qwen3_moe", seed=1), dtype=dtype)
    again.load(tmp_path)
    for each in (engine, again):
        stepped(each, sequences(seed=1), likelihood_loss)
    assert largest_difference(weights(engine), weights(again)) == 0.0


@pytest.fixture
def gemma_dir(tmp_path):
    """An architecture whose names on disk we know nothing of."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }

    def directory(**changes: object):
        path = tmp_path / f"gemma{len(changes)}"
        AutoModelForCausalLM.from_config(Gemma2Config(**sizes | heads | changes)).save_pretrained(path)
        make_tokenizer(path)
        return path

    return directory


def test_an_architecture_without_known_names_is_saved_by_transformers_and_goes_on_the_same(gemma_dir, tmp_path):
    engine = language_engine(gemma_dir())
    stepped(engine, sequences(), likelihood_loss)
    engine.save(tmp_path)
    again = language_engine(gemma_dir())
    again.load(tmp_path)
    for each in (engine, again):
        stepped(each, sequences(seed=1), likelihood_loss)
    assert largest_difference(weights(engine), weights(again)) == 0.0
    other = language_engine(gemma_dir(intermediate_size=40))
    with pytest.raises(EngineError, match="is of another model") as caught:
        other.load(tmp_path)
    assert "model.path" in caught.value.remedy
