"""CPUs and GPUs, their drivers and memory, and the links between GPUs."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.checks.machine import number_in
from hybridflow.doctor.finding import Finding, ok, problem, warning
from hybridflow.observability.formatting import counted
from hybridflow.process import num_cores

_SMI = "nvidia-smi"
_SMI_SECONDS = 20.0
_FIELDS = ("index", "name", "driver_version", "ecc.errors.uncorrected.volatile.total")
_USED = 0.1
"""The share of a GPU's memory above which other programs are said to use it."""

_QUOTA, _PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def _cpus(place: Place) -> Iterator[Finding]:
    cores, load = num_cores(), psutil.getloadavg()[0]
    quota = _quota()
    found = f"{counted(cores, 'core')}, load {load:.1f}"
    if quota is not None and quota < cores:
        found = f"{found}; this container may use {quota:.1f} of them"
    if load > 2 * (quota or cores):
        yield warning("cpus", found, "Other programs use this machine: end them, or expect slow steps.")
    else:
        yield ok("cpus", found)


def _quota() -> float | None:
    """The cores that a container may use; None without a limit."""
    try:
        quota, period = map(float, _CPU_MAX.read_text().split())
    except (OSError, ValueError):
        quota, period = number_in(_QUOTA) or -1, number_in(_PERIOD) or 1
    return quota / period if quota > 0 else None


def _gpus(place: Place) -> Iterator[Finding]:
    import torch

    cards = _cards(place)
    if not torch.cuda.is_available():
        yield from _unused(cards, torch.version.cuda)
        return
    for index in range(torch.cuda.device_count()):
        name = f"gpu {index}"
        place.doing(f"computing on {name}")
        free, total = torch.cuda.mem_get_info(index)
        numbers = torch.arange(1024, device=f"cuda:{index}", dtype=torch.float32).reshape(32, 32)
        identity = torch.eye(32, device=f"cuda:{index}")
        if not torch.equal(numbers @ identity, numbers):
            yield problem(name, f"{torch.cuda.get_device_name(index)} computes wrong products", "Replace this GPU.")
            continue
        found = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < (1 - _USED) * total:
            yield warning(name, found, f"End the programs that use it: {_SMI}")
        else:
            yield ok(name, found)
    for index, card, _, errors in cards:
        if errors.isdigit() and int(errors):
            yield warning(
                f"gpu {index}", f"{card} has {counted(int(errors), 'uncorrected memory error')}", "Reset or replace it."
            )
    driver = f"driver {cards[0][2]}, " if cards else ""
    yield ok("cuda", f"{driver}torch is built for CUDA {torch.version.cuda}")


def _unused(cards: Sequence[Sequence[str]], cuda: str | None) -> Iterator[Finding]:
    """GPUs that torch does not see."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not cards:
        yield ok("gpus", "none: runs use the CPU")
    elif hidden is not None and not hidden.strip("-1, "):
        yield ok("gpus", f"{counted(len(cards), 'GPU')}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}")
    elif cuda is None:
        yield warning(
            "gpus",
            f"this machine has {counted(len(cards), 'GPU')} ({cards[0][1]}), but torch is a CPU build",
            "pip install --force-reinstall torch, from an index with CUDA builds, to use them",
        )
    else:
        yield problem(
            "gpus",
            f"torch is built for CUDA {cuda}, but cannot use {cards[0][1]} with driver {cards[0][2]}",
            f"Install a driver for CUDA {cuda} or later, or a torch that is built for the CUDA version of {_SMI}.",
        )


def _cards(place: Place) -> list[list[str]]:
    """The GPUs that the driver's tool lists; none without it."""
    if shutil.which(_SMI) is None:
        return []
    place.doing(f"asking {_SMI}")
    command = [_SMI, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(_FIELDS)] if done.returncode == 0 else []


def _links(place: Place) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        yield warning(
            "links",
            f"{len(apart)} of {len(pairs)} pairs of GPUs cannot access each other's memory, such as {apart[0]}",
            "Expect slow collectives, which pass through the host: see nvidia-smi topo -m.",
        )
    else:
        yield ok("links", f"all {count} GPUs can access one another's memory")


CHECKS = (
    Check("cpus", "looking at CPUs", _cpus),
    Check("gpus", "looking for GPUs", _gpus, seconds=60.0, needs=("imports",)),
    Check("links", "looking at links between GPUs", _links, seconds=60.0, needs=("gpus",)),
)
