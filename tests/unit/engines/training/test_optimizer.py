"""AdamW, on weights of any number format, and its learning rate."""

import pytest
import torch
from torch import nn

from hybridflow.config.training import Optimizer, Schedule
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.optimizer import MasterAdamW, learning_rate, make_optimizer
from tests.unit.engines.training.late_link import LateLink

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


def steps(dtype: torch.dtype, link: LateLink | None) -> tuple[list[torch.Tensor], MasterAdamW]:
    """Weights after five steps, of an optimizer whose state waits on the host from the start, and comes back once."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(16, 48, generator=generator).to(dtype)
    weights = [nn.Parameter(torch.randn(n, 32, generator=generator).to(dtype)) for n in [8] * 20 + [9]]
    weights += [nn.Parameter(torch.randn(32, generator=generator).to(dtype)), nn.Parameter(wide[:, :32])]
    idle = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    optimizer, pool = make_optimizer([*weights, idle], Optimizer(learning_rate=0.1)), link and HostPool(link)
    for step in range(5):
        if pool is not None and step != 3:
            optimizer.offload(pool)
        elif pool is not None:
            optimizer.onload()
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    assert torch.equal(idle, torch.ones(8, 8, dtype=dtype))
    return [*weights, wide], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_waits_on_the_host_gives_the_same_numbers_with_three_buckets_on_the_device(dtype):
    link = LateLink(bucket_bytes=1 << 12)
    expected, resident = steps(dtype, None)
    weights, optimizer = steps(dtype, link)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    for own, other in zip(optimizer.state.values(), resident.state.values(), strict=True):
        assert all(torch.equal(own[kind], other[kind]) for kind in other)
    tensors = 3 if dtype is torch.bfloat16 else 2
    sizes = [4 * tensors * parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    assert link.reserved_bytes <= sum(sizes) + 256 * tensors * len(sizes)
    before = link.reserved_bytes, link.here
    link.most = link.here
    for parameter in weights[:-1]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (link.reserved_bytes, link.here) == before
    assert link.most - link.here <= 3 * max(link.bucket_bytes, *sizes) < sum(sizes) / 2


def test_a_step_that_fails_leaves_all_state_on_the_host():
    link, model = LateLink(), nn.Linear(32, 32)
    optimizer = make_optimizer([*model.parameters()], SMALL_STEPS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.offload(HostPool(link))
    optimizer.step()
    kept = {kind: tensor.clone() for kind, tensor in optimizer.state[model.weight].items()}
    model.weight.grad = torch.ones(32, 32).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all(torch.equal(optimizer.state[model.weight][kind], kept[kind]) for kind in ("exp_avg", "exp_avg_sq"))


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


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (5, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (4, {"schedule": Schedule.linear}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (4, {"schedule": Schedule.cosine}, [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
        (4, {"warmup_steps": 2, "schedule": Schedule.linear}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (3, {"warmup_steps": 10, "schedule": Schedule.cosine}, [0.1, 0.2, 0.3, 0.4]),
    ],
    ids=["constant after the warm-up", "linear to zero", "cosine to zero", "peak ends the warm-up", "only a warm-up"],
)
def test_rates_from_the_first_step_to_beyond_the_last(steps, settings, expected):
    optimizer = Optimizer(learning_rate=1.0, **settings)
    rates = [learning_rate(step, optimizer=optimizer, total_steps=steps) for step in range(len(expected))]
    assert rates == pytest.approx(expected, abs=1e-6)
