"""The single engine on value models: one number per token, of the state before it."""

import copy

import torch

from hybridflow.models.heads import load_value_model
from tests.oracles import training as oracle
from tests.toys import sequences, stepped, values_of
from tests.unit.engines.training.engines import largest_difference, squared_loss, value_engine, weights, with_returns


def trained(directory, **settings):
    engine = value_engine(directory, **settings)
    for seed in range(3):
        stepped(engine, with_returns(seed), squared_loss)
    return engine


def values_of_row(model, row):
    """The head on the hidden state of the token before each response token."""
    ids = torch.cat([row["prompt_ids"], row["response_ids"]])
    hidden = model.backbone(input_ids=ids[None]).last_hidden_state[0]
    everywhere = (hidden @ model.score.weight[0] + model.score.bias).float()
    first = len(row["prompt_ids"])
    return torch.stack([everywhere[first + r - 1] for r in range(len(row["response_ids"]))])


def test_a_value_is_that_of_the_position_before_its_token(toy_dir):
    engine, batch = trained(toy_dir()), sequences(seed=7)
    values = values_of(engine, batch)
    model = copy.deepcopy(engine.model)
    model.backbone.set_attn_implementation("sdpa")
    with torch.no_grad():
        for i, row in enumerate(oracle.rows_of(batch)):
            assert torch.allclose(values.row(i), values_of_row(model, row), atol=1e-5)


def test_training_equals_the_obvious_loop(toy_dir):
    engine = trained(toy_dir(), microbatch_tokens=16)
    model = load_value_model(toy_dir(), dtype=torch.float32, device="cpu")

    def loss(model, row):
        return ((values_of_row(model, row) - row["returns"]).square() * row["response_mask"]).sum()

    steps = [oracle.rows_of(with_returns(seed)) for seed in range(3)]
    oracle.train(model, steps, loss, engine._training.optimizer)
    # Measured 2e-6: float32 sums in another order, through three steps.
    assert largest_difference(weights(engine), dict(model.named_parameters())) < 2e-5
