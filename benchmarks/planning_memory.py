"""Peak memory of other trainers, and whether large models fit: published numbers next to predictions."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.planning_report import Criterion, Section
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.devices import Device
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.phases import ENGINES, GIB, Phase, colocated_phases
from hybridflow.mapping.memory.rollout import GENERATING
from hybridflow.mapping.memory.systems import FLOAT32, FUSED, System
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.catalogue import find_model

PUBLISHED = Path(__file__).parent / "published" / "memory.yaml"
TOLERANCE = 0.15
"""A prediction is right within this fraction of the published peak."""

MICROBATCHES = 2
"""Microbatches per device in prime-rl's benchmark."""

LORA_RANK = 16
VERL_DEVICE, VERL_PROMPT, VERL_RESPONSE, VERL_ROWS = "H20", 2048, 9632, 256


class Row(NamedTuple):
    """A published peak and its prediction."""

    name: str
    published: float | None
    """GiB; None if the trainer ran out of memory."""

    predicted: float
    """GiB of tensors."""

    lacks: float
    """GiB that the device lacks, with what engines take themselves; negative if it fits."""

    why: str
    """The reason for a large error."""

    @property
    def error(self) -> float:
        """Relative error; 0 for a row without a peak."""
        return self.predicted / self.published - 1 if self.published else 0.0

    @property
    def is_right(self) -> bool:
        """Whether the prediction is within the tolerance, or says that a row without a peak does not fit."""
        return abs(self.error) <= TOLERANCE if self.published else self.lacks > 0


class Edge(NamedTuple):
    """A configuration at the edge of what fits, and its prediction in GiB."""

    name: str
    phase: str
    """The phase that takes most memory."""

    predicted: float
    """Device memory in that phase."""

    lacks: float
    """Device memory that is missing; negative if it fits."""

    host: float
    """Host memory per node."""

    host_lacks: float
    measured: tuple[float, float] | None
    """Published gigabytes (10^9 bytes) per device and of host memory per node."""

    @property
    def fits(self) -> bool:
        """Whether both memories suffice."""
        return max(self.lacks, self.host_lacks) <= 0


def sections() -> list[Section]:
    """The tables of memory."""
    compared, held_out = rows("compared"), rows("held_out")
    fitting = [row for row in compared if row.published]
    right = sum(row.is_right for row in fitting)
    surprises = [row for row in [*compared, *held_out] if row.published is None and row.lacks <= 0]
    refused = [row for row in fitting if row.lacks > 0]
    published, fewer, less = edges("published"), edges("fewer_devices"), edges("less_offloading")
    fits = sum(edge.fits for edge in published)
    return [
        Section(
            "Peak memory of prime-rl's trainer, GiB per device",
            lines(compared),
            [
                Criterion(
                    f"within {TOLERANCE:.0%} on at least 80% of the rows that fit",
                    f"{right} of {len(fitting)}, median error {median(fitting):.1%}",
                    right >= 0.8 * len(fitting),
                ),
                Criterion("no row fits that ran out of memory", f"{len(surprises)}", not surprises),
                Criterion("no row that fits is refused", f"{len(refused)}", not refused),
            ],
        ),
        Section(
            "The same, rows that were read after the prediction was final",
            lines(held_out),
            [
                Criterion(
                    f"within {TOLERANCE:.0%} on at least 80%",
                    f"{sum(row.is_right for row in held_out)} of {len(held_out)}, median error {median(held_out):.1%}",
                    sum(row.is_right for row in held_out) >= 0.8 * len(held_out),
                )
            ],
        ),
        Section(
            f"verl on {VERL_DEVICE}: recommended configurations, GiB per device and of host memory per node",
            edge_lines(published),
            [Criterion("all fit", f"{fits} of {len(published)}", fits == len(published))],
        ),
        Section("The same on fewer devices than the source says are needed", edge_lines(fewer), [_none_fits(fewer)]),
        Section("The same with less offloading than the source recommends", edge_lines(less), [_none_fits(less)]),
    ]


def rows(table: str) -> list[Row]:
    """The rows of a table of prime-rl's trainer."""
    return [_row(entry) for entry in _published()[table]]


def edges(table: str) -> list[Edge]:
    """The rows of a table of verl's configurations."""
    return [_edge(entry) for entry in _published()[table]]


def lines(found: Sequence[Row]) -> list[str]:
    """The rows as text."""
    head = f"{'':58}{'published':>10}{'predicted':>10}{'error':>8}"
    text = [head]
    for row in found:
        published = f"{row.published:10.1f}" if row.published else f"{'OOM':>10}"
        error = f"{row.error:+8.1%}" if row.published else f"{'fits' if row.lacks <= 0 else 'OOM':>8}"
        text.append(f"{row.name:58}{published}{row.predicted:10.1f}{error}")
        if row.why:
            text.append(f"    {row.why}")
    return text


def edge_lines(found: Sequence[Edge]) -> list[str]:
    """The configurations as text."""
    text = []
    for edge in found:
        device, host = f"{edge.predicted:8.1f}{_margin(edge.lacks)}", f"{edge.host:9.0f}{_margin(edge.host_lacks)}"
        verdict = "fits" if edge.fits else "does not fit"
        text.append(f"{edge.name:46}{device}{host}{verdict:>14}  most when {edge.phase}")
        if edge.measured:
            own = [size * GIB / 1e9 for size in (edge.predicted, edge.host)]
            shown = [f"{each:.0f} GB ({size / each - 1:+.0%})" for size, each in zip(own, edge.measured, strict=True)]
            text.append(f"    The source measured {shown[0]} per device and {shown[1]} of host memory per node.")
    return text


def median(found: Sequence[Row]) -> float:
    """The median of the relative errors' sizes."""
    return statistics.median(abs(row.error) for row in found if row.published)


def _row(entry: Mapping[str, Any]) -> Row:
    system, tokens, count = entry["system"], entry["tokens"], entry["devices"]
    offloads = entry.get("offloads_kept", False)
    use = ModelUse(
        find_model(entry["model"]).geometry, 2, is_trained=True, lora_rank=LORA_RANK if system == "lora" else 0
    )
    layout = TrainingLayout(engine=TrainingEngine.fsdp, data=count, microbatch_tokens=tokens)
    workload = Workload(MICROBATCHES * count, Lengths((0.0,)), Lengths((tokens,)), 1)
    device = find_device(entry["device"]).device
    phase = _phase(use, layout, workload, replace(_system(system), offloads_kept=offloads), device)
    offloaded = ", inputs offloaded" if offloads else ""
    name = f"{entry['device']} x{count} {entry['model']} {system} {tokens // 1024}k{offloaded}"
    own = phase.total - device.reserved_bytes  # as max_memory_reserved() counts
    return Row(name, entry["peak_gib"], own / GIB, phase.shortage(device) / GIB, entry.get("why", ""))


def _none_fits(found: Sequence[Edge]) -> Criterion:
    beyond = sum(not edge.fits for edge in found)
    return Criterion("none fits", f"{beyond} of {len(found)} do not", beyond == len(found))


def _margin(lacks: float) -> str:
    return f"{'  lacks ' if lacks > 0 else '  leaves'}{abs(lacks):7.1f}"


def _edge(entry: Mapping[str, Any]) -> Edge:
    tensor, pipeline, fraction = entry["tensor"], entry["pipeline"], entry["offload"]
    layout = TrainingLayout(
        engine=TrainingEngine.megatron,
        data=entry["devices"] // tensor // pipeline,
        tensor=tensor,
        pipeline=pipeline,
        expert=entry["expert"],
        sequence_parallel=True,
        microbatch_tokens=VERL_PROMPT + VERL_RESPONSE,
        offload_parameters=True,
        offload_optimizer=fraction > 0,
    )
    actor = ModelUse(find_model(entry["model"]).geometry, 2, is_trained=True)
    workload = Workload(VERL_ROWS, Lengths((VERL_PROMPT,)), Lengths((VERL_RESPONSE,)), 1)
    system, cluster = replace(_system("verl"), offloaded_optimizer=fraction), find_device(VERL_DEVICE)
    uses = {"actor": actor, "reference": replace(actor, is_trained=False)}
    roles = [training_memory(role, use, layout, workload, system=system) for role, use in uses.items()]
    on_device = roles[0].resident["optimizer of actor"]
    moved = on_device * (1 - FLOAT32 / system.optimizer_bytes) * entry["moves_moments"]
    generating = _generating(entry["model"], on_device - moved, cluster.device)
    phase = max([*colocated_phases(roles, cluster.device), generating], key=lambda phase: phase.total)
    host = sum(role.host_bytes for role in roles) + moved
    measured = (entry["measured_gb"], entry["measured_host_gb"]) if "measured_gb" in entry else None
    sizes = f"t{tensor} p{pipeline} e{entry['expert']}"
    return Edge(
        name=f"{entry['model']} on {entry['devices']} {sizes} offload {fraction:g}",
        phase=phase.name,
        predicted=phase.total / GIB,
        lacks=phase.shortage(cluster.device) / GIB,
        host=host * cluster.devices_per_node / GIB,
        host_lacks=(host - cluster.offload_bytes) * cluster.devices_per_node / GIB,
        measured=measured,
    )


def _generating(model: str, optimizer_bytes: float, device: Device) -> Phase:
    """verl's generation: vLLM's fraction of the device, next to the optimizer's state that stays there."""
    rollout = _published()["vllm_fraction"][model] * device.memory_bytes
    parts = {ENGINES: device.reserved_bytes, "vLLM": rollout, "optimizer of actor": optimizer_bytes}
    return Phase(GENERATING, parts)


def _phase(use: ModelUse, layout: TrainingLayout, workload: Workload, system: System, device: Device) -> Phase:
    (phase,) = colocated_phases([training_memory("actor", use, layout, workload, system=system)], device)
    return phase


def _system(name: str) -> System:
    return System(kept=FUSED, **_published()["systems"][name])


@cache
def _published() -> Mapping[str, Any]:
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
