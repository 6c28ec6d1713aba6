"""AdamW, on weights of any number format."""

import pytest
import torch
from torch import nn

from hybridflow.config.model import Dtype
from hybridflow.config.training import Optimizer
from hybridflow.engines.training.optimizer import make_optimizer, move_optimizer, optimizer_over
from tests.toys import sequences
from tests.unit.engines.training.engines import language_engine, largest_difference, likelihood_loss, weights

SMALL_STEPS = Optimizer(learning_rate=1e-6)


def moved(dtype: torch.dtype, steps: int, config: Optimizer = SMALL_STEPS) -> nn.Linear:
    """A linear map after steps along gradients that always point the same way."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    optimizer = make_optimizer(model, config)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model


def test_small_steps_add_up_in_bfloat16_as_they_do_in_float32():
    start, end = moved(torch.bfloat16, 0), moved(torch.bfloat16, 2000)
    exact = moved(torch.float32, 0).to(torch.bfloat16).float()
    assert torch.equal(start.weight.float(), exact.weight)
    distance = (start.weight.detach().float() - end.weight.detach().float()).mean()
    # 2000 steps of 1e-6; bfloat16 near 0.3 is rounded to 0.001.
    assert abs(float(distance) - 2e-3) < 5e-4


def test_float32_weights_are_moved_themselves():
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(model, SMALL_STEPS)
    assert optimizer.weight_of == {}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_was_moved_goes_on_the_same(dtype):
    models = []
    for is_moved in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(dtype)
        optimizer = make_optimizer(model, Optimizer(learning_rate=0.1))
        places = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, step - 0.5)
            optimizer.step()
            if is_moved:
                before = [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
                move_optimizer(optimizer, torch.device("cpu"))
                after = [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
                assert not set(before) & set(after)
        assert places == {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_weight_without_a_gradient_stays():
    model = nn.Linear(4, 4).bfloat16()
    before = model.weight.detach().clone()
    model.bias.grad = torch.ones_like(model.bias)
    make_optimizer(model, Optimizer(learning_rate=0.1)).step()
    assert torch.equal(model.weight, before)


def test_an_engine_in_bfloat16_trains_and_goes_on_the_same_from_a_checkpoint(toy_dir, tmp_path):
    config = Optimizer(learning_rate=1e-4)
    engine = language_engine(toy_dir(), dtype=Dtype.bfloat16, optimizer=config)
    losses = [engine.train_step(sequences(), likelihood_loss)["loss"].value for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1
    assert engine.forward(sequences()).tokens("logprobs").values.dtype is torch.float32
    engine.save(tmp_path)
    again = language_engine(toy_dir(seed=1), dtype=Dtype.bfloat16, optimizer=config)
    again.load(tmp_path)
    for each in (engine, again):
        each.train_step(sequences(seed=1), likelihood_loss)
    assert largest_difference(weights(engine), weights(again)) == 0.0


def test_weights_that_are_columns_of_a_wider_tensor_are_moved_exactly_as_others_and_nothing_beside_them():
    """Beside one another, in one group: the other parameters do not leave the fused kernel either."""
    wide = torch.full((4, 37), 7.0)
    columns, plain, beside = (torch.nn.Parameter(torch.zeros(4, 33)) for _ in range(3))
    columns.data = wide[:, :33]
    place = columns.data_ptr()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 33, generator=generator)
    for parameter in (columns, plain, beside):
        parameter.data.copy_(start)
    bound = optimizer_over([columns, beside], Optimizer(learning_rate=0.1, epsilon=1e-3))
    free = optimizer_over([plain], Optimizer(learning_rate=0.1, epsilon=1e-3))
    for _ in range(3):
        gradient = torch.randn(4, 33, generator=generator)
        for parameter in (columns, plain, beside):
            parameter.grad = gradient.clone()
        with torch.profiler.profile() as profile:
            bound.step()
        kernels = {event.key for event in profile.key_averages()}
        assert "aten::_fused_adamw_" in kernels and "aten::addcdiv_" not in kernels
        free.step()
    assert torch.equal(wide[:, 33:], torch.full((4, 4), 7.0))
    assert columns.data_ptr() == place and columns.stride() == (37, 1)
    assert torch.equal(columns, plain) and torch.equal(beside, plain)
