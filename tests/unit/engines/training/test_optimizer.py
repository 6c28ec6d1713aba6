"""AdamW, on weights of any number format."""

import pytest
import torch
from torch import nn

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer
from tests.unit.engines.training.late_lane import LateLane

SMALL_STEPS = Optimizer(learning_rate=1e-6)


def moved(dtype: torch.dtype, steps: int, config: Optimizer = SMALL_STEPS) -> nn.Linear:
    """A linear map after steps along gradients that always point the same way."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    optimizer = make_optimizer([*model.parameters()], config)
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
    optimizer = make_optimizer([*model.parameters()], SMALL_STEPS)
    assert optimizer.weight_of == {}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))


def steps(dtype: torch.dtype, lane: LateLane | None) -> tuple[list[torch.Tensor], MasterAdamW]:
    """Weights after five steps, of an optimizer whose state waits on the host from the start, and comes back once."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(16, 48, generator=generator).to(dtype)
    weights = [nn.Parameter(torch.randn(n, 32, generator=generator).to(dtype)) for n in [8] * 20 + [9]]
    weights += [nn.Parameter(torch.randn(32, generator=generator).to(dtype)), nn.Parameter(wide[:, :32])]
    idle = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    optimizer, shelf = make_optimizer([*weights, idle], Optimizer(learning_rate=0.1)), lane and HostShelf(lane)
    for step in range(5):
        if shelf is not None and step != 3:
            optimizer.rest(shelf)
        elif shelf is not None:
            optimizer.bring_back()
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    assert torch.equal(idle, torch.ones(8, 8, dtype=dtype))
    return [*weights, wide], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_waits_on_the_host_gives_the_same_numbers_with_three_buckets_on_the_device(dtype):
    lane = LateLane(bucket_bytes=1 << 12)
    expected, resident = steps(dtype, None)
    weights, optimizer = steps(dtype, lane)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    for own, other in zip(optimizer.state.values(), resident.state.values(), strict=True):
        assert all(torch.equal(own[kind], other[kind]) for kind in other)
    tensors = 3 if dtype is torch.bfloat16 else 2
    sizes = [4 * tensors * parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    assert lane.reserved_bytes <= sum(sizes) + 256 * tensors * len(sizes)
    before = lane.reserved_bytes, lane.here
    lane.most = lane.here
    for parameter in weights[:-1]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (lane.reserved_bytes, lane.here) == before
    assert lane.most - lane.here <= 3 * max(lane.bucket_bytes, *sizes) < sum(sizes) / 2


def test_a_step_that_fails_leaves_all_state_on_the_host():
    lane, model = LateLane(), nn.Linear(32, 32)
    optimizer = make_optimizer([*model.parameters()], SMALL_STEPS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.rest(HostShelf(lane))
    optimizer.step()
    kept = {kind: tensor.clone() for kind, tensor in optimizer.state[model.weight].items()}
    model.weight.grad = torch.ones(32, 32).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all(torch.equal(optimizer.state[model.weight][kind], kept[kind]) for kind in ("exp_avg", "exp_avg_sq"))


def test_a_weight_without_a_gradient_stays():
    model = nn.Linear(4, 4).bfloat16()
    before = model.weight.detach().clone()
    model.bias.grad = torch.ones_like(model.bias)
    make_optimizer([*model.parameters()], Optimizer(learning_rate=0.1)).step()
    assert torch.equal(model.weight, before)


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
    bound = make_optimizer([columns, beside], Optimizer(learning_rate=0.1, epsilon=1e-3))
    free = make_optimizer([plain], Optimizer(learning_rate=0.1, epsilon=1e-3))
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
