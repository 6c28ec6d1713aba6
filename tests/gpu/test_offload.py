"""State and weights that wait on the host: the same numbers, and memory of the device that others can use."""

import pytest
import torch
from torch import nn

from hybridflow.config.model import Dtype, Model
from hybridflow.config.training import Optimizer, Training
from hybridflow.engines.rollout.memory import WeightBuffer
from hybridflow.engines.training import setup as engine_setup
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.host_memory import CudaHostLink, HostLink, HostPool
from hybridflow.engines.training.interface import Part
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer
from hybridflow.engines.training.single import SingleEngine
from hybridflow.parallel.groups import Ranks
from tests.toys import logprobs_of, sequences, stepped
from tests.unit.engines.training.engines import GENTLE, likelihood_loss
from tests.unit.engines.training.late_link import LateLink


def small_link(device: torch.device) -> HostLink:
    """A link with buckets that are much smaller than the state."""
    return CudaHostLink(device, 1 << 18) if device.type == "cuda" else LateLink(1 << 18)


def four_steps(
    device: torch.device, dtype: torch.dtype, link: HostLink | None
) -> tuple[list[nn.Parameter], MasterAdamW]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(256, 100)] * 20 + [(513,)] * 3
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    wide = torch.randn(256, 120, generator=generator).to(device, dtype)
    weights.append(nn.Parameter(wide[:, :100]))
    optimizer = make_optimizer(weights, Optimizer(learning_rate=0.1))
    if link is not None:
        optimizer.offload(HostPool(link))
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return weights, optimizer


def waits_for_the_device(memory: torch.Tensor) -> bool:
    """Whether copies to it wait for the work before: only page-locked memory spares the host that.

    `is_pinned` knows the memory of PyTorch's own allocator only.
    """
    there = memory.to("cuda")
    torch.cuda._sleep(50_000_000)
    memory.copy_(there, non_blocking=True)
    has_waited = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return has_waited


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_waits_on_the_host_gives_the_same_numbers(device, dtype):
    expected, resident = four_steps(device, dtype, None)
    weights, optimizer = four_steps(device, dtype, small_link(device))
    assert all(map(torch.equal, weights, expected))
    for own, other in zip(optimizer.state.values(), resident.state.values(), strict=True):
        assert all(torch.equal(own[kind].cpu(), other[kind].cpu()) for kind in other)
    moments = [tensor for state in optimizer.state.values() for kind, tensor in state.items() if kind != "step"]
    assert all(moment.device.type == "cpu" for moment in moments)
    if device.type == "cuda":
        assert not any(map(waits_for_the_device, moments))
        whole = sum(moment.nbytes for moment in moments)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        assert torch.cuda.memory_allocated(device) == before
        assert torch.cuda.max_memory_allocated(device) - before < whole / 2


def engine_on(device: torch.device, directory, **settings: object) -> SingleEngine:
    engine = make_language_engine(
        Model(path=str(directory), dtype=Dtype.bfloat16),
        Training(optimizer=GENTLE, **settings),
        total_optimizer_steps=100,
        device=device,
        ranks=Ranks.alone(),
    )
    assert isinstance(engine, SingleEngine)
    return engine


def test_an_engine_whose_memory_waits_on_the_host_trains_the_same(device, toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_setup, "host_link", lambda device: None)
    twin = engine_on(device, toy_dir())
    monkeypatch.setattr(engine_setup, "host_link", small_link)
    engine = engine_on(device, toy_dir(), offload_optimizer=True)
    for seed in range(3):
        norms = []
        for each in (engine, twin):
            norms.append(stepped(each, sequences(seed=seed), likelihood_loss)["grad_norm"].value)
        # One rounding of a bfloat16 weight: sums over tokens may be in another order on a GPU.
        assert norms[0] == pytest.approx(norms[1], rel=1e-2)
        engine.offload(*Part)
        if device.type == "cuda":
            assert all(parameter.device.type == "cpu" for parameter in engine.model.parameters())
    engine.save(tmp_path)
    again = engine_on(device, toy_dir(seed=1), offload_optimizer=True)
    again.load(tmp_path)
    left, right = (logprobs_of(each, sequences()).values for each in (engine, again))
    assert torch.allclose(left, right, atol=1e-3)


def test_weights_of_a_rollout_engine_stay_without_a_warning_where_they_cannot_be_given_back(device, caplog):
    buffer = WeightBuffer([nn.Parameter(torch.ones(1 << 20, 32, device=device), requires_grad=False)])
    released = buffer.release()
    assert (released.weight_bytes == 0) == (device.type == "cuda")
    assert released.weight_bytes + released.left_bytes == buffer.num_bytes
    assert caplog.records == []
