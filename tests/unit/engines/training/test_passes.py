"""Passes over microbatches: forward columns, and gradients that add up."""

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig

from hybridflow.config.model import Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.microbatch import make_microbatches
from hybridflow.engines.training.passes import accumulate_gradients, forward_pass
from hybridflow.engines.training.setup import LANGUAGE, EngineSetup, prepared
from hybridflow.parallel.groups import Ranks
from tests.toys import TEMPERATURE, sequences
from tests.unit.engines.training.engines import likelihood_loss

CPU = torch.device("cpu")


def asked(directory):
    setup = EngineSetup(
        LANGUAGE, Model(path=str(directory)), Training(engine=TrainingEngine.single), 1, CPU, Ranks.alone()
    )
    return prepared(setup, setup.load(setup.directory))


def micros(batch, **settings):
    return make_microbatches(batch, **({"budget_tokens": 25, "device": CPU} | settings))


def outputs_of(model, parts):
    return forward_pass(model, parts, ("logprobs", "entropy"), temperature=TEMPERATURE)


def gradients(model, batch, parts, **settings):
    model.zero_grad()
    metrics = accumulate_gradients(model, batch, parts, likelihood_loss, temperature=TEMPERATURE, **settings)
    return metrics, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [{"multiple_of": 16}, {"at_least": 7}, {"multiple_of": 8, "at_least": 5}])
def test_dummies_change_neither_columns_nor_gradients(toy_dir, settings):
    model, batch = asked(toy_dir()), sequences()
    plain, filled = micros(batch), micros(batch, **settings)
    expected, found = outputs_of(model, plain), outputs_of(model, filled)
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(found.tokens(name).values, expected.tokens(name).values, rtol=0, atol=1e-5)
        assert torch.equal(found.tokens(name).offsets, expected.tokens(name).offsets)
    (metrics, grads), (wanted_metrics, wanted) = gradients(model, batch, filled), gradients(model, batch, plain)
    assert metrics["loss"].value == pytest.approx(wanted_metrics["loss"].value, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max()))


def test_the_order_of_rows_and_of_micro_batches_does_not_matter(toy_dir):
    model, batch = asked(toy_dir()), sequences()
    order = torch.tensor([3, 0, 4, 2, 1])
    expected = outputs_of(model, micros(batch)).tokens("logprobs")
    found = outputs_of(model, micros(batch.select(order))[::-1]).tokens("logprobs")
    for place, row in enumerate(order.tolist()):
        torch.testing.assert_close(found.row(place), expected.row(row), rtol=0, atol=1e-5)


def test_a_rank_without_rows_answers_with_none_and_gives_zero_gradients(toy_dir):
    model = asked(toy_dir())
    empty = sequences().select(torch.empty(0, dtype=torch.int64))
    parts = micros(empty, at_least=2)
    outputs = outputs_of(model, parts)
    assert outputs.columns == ["logprobs", "entropy"]
    assert len(outputs.tokens("logprobs")) == 0
    metrics, grads = gradients(model, empty, parts)
    assert metrics == {}
    assert not any(grad.any() for grad in grads.values())


def test_a_model_that_needs_padding_is_reported(caplog):
    config = FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    setup = EngineSetup(LANGUAGE, Model(path="a-falcon"), Training(), 1, CPU, Ranks.alone())
    with caplog.at_level("WARNING"):
        prepared(setup, model)
    assert "model=a-falcon" in caplog.text and "does not support packed sequences" in caplog.text


def test_rotations_that_depend_on_the_longest_sequence_are_reported(toy_dir, caplog):
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model, batch = asked(toy_dir("llama", rope_parameters=scaled, max_position_embeddings=8)), sequences()
    assert "rope_type=dynamic" in caplog.text
    together, alone = (outputs_of(model, micros(batch, budget_tokens=n)) for n in (1000, 1))
    gaps = (together.tokens("logprobs").values - alone.tokens("logprobs").values).abs()
    assert float(gaps.max()) > 1e-3, "if this no longer is so, the warning is not needed"


def test_engines_know_which_backward_pass_is_the_last(toy_dir):
    is_last = []
    batch = sequences()
    gradients(asked(toy_dir()), batch, micros(batch, at_least=4), before_backward=is_last.append)
    assert is_last == [False, False, False, True]
