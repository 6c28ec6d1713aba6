"""Collectives over several processes, and their bandwidth: gloo, and NCCL where there are several GPUs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem

if TYPE_CHECKING:
    from hybridflow.calibration.processes import Place as Rank
    from hybridflow.calibration.rates import LinkRates

_SECONDS = 60.0
_MOST_GPUS = 8


def _gloo(place: Place) -> Iterator[Finding]:
    yield from _collective(place, "gloo", "cpu", 2)


def _nccl(place: Place) -> Iterator[Finding]:
    import torch

    if (count := torch.cuda.device_count()) > 1:
        yield from _collective(place, "nccl", "cuda", min(count, _MOST_GPUS))


def _collective(place: Place, name: str, kind: str, size: int) -> Iterator[Finding]:
    place.doing(f"importing torch in {size} processes")
    from hybridflow.calibration.processes import run_on

    place.doing(f"reducing tensors over {size} processes with {name}")
    answers = run_on(kind, size, _reduced, timeout_seconds=_SECONDS)
    if not all(is_right for is_right, _ in answers):
        yield problem(name, f"an all-reduce over {size} processes gives a wrong sum", "Replace or reset these devices.")
        return
    rates = answers[0][1]
    found = (
        f"{size} processes: {rates.sync_seconds * 1e6:.0f} us per small all-reduce, {rates.bandwidth / 1e9:.2f} GB/s"
    )
    yield ok(name, found)


def _reduced(rank: "Rank") -> "tuple[bool, LinkRates]":
    """Whether a sum over all processes is right, and the rates; run by each process."""
    import torch
    import torch.distributed as dist

    from hybridflow.calibration.rates import link_rates

    numbers = torch.full((1 << 16,), rank.rank + 1.0, device=rank.device)
    dist.all_reduce(numbers)
    return bool((numbers == rank.size * (rank.size + 1) / 2).all()), link_rates(rank)


CHECKS = (
    Check("gloo", "reducing tensors over processes", _gloo, seconds=90.0, needs=("imports", "loopback")),
    Check("nccl", "looking for several GPUs", _nccl, seconds=90.0, needs=("gpus", "gloo")),
)
