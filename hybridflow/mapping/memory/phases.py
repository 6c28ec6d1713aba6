"""Roles on the same devices: what their memory adds up to in each phase of a step, and what does not fit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.mapping.devices import Device
from hybridflow.mapping.elementwise import largest

GIB = 1 << 30

ENGINES = "driver, CUDA context, NCCL and fragmentation"
"""Name of the memory that no tensor can use."""


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one role on its fullest device, in bytes by part."""

    resident: Mapping[str, float]
    """Throughout the step."""

    phases: Mapping[str, Mapping[str, float]]
    """Parts that exist in addition while a phase runs."""

    host: Mapping[str, float] = field(default_factory=dict)
    """In the memory of the device's node, for this device."""

    @cached_property
    def resident_bytes(self) -> float:
        """Bytes that it takes throughout the step."""
        return sum(self.resident.values())

    @cached_property
    def extra_bytes(self) -> float:
        """The most that one of its phases takes in addition."""
        return largest(sum(parts.values()) for parts in self.phases.values())

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of host memory."""
        return sum(self.host.values())


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one device: the contents of its memory, in bytes."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total bytes."""
        return float(sum(self.parts.values()))

    @property
    def largest(self) -> str:
        """`activations 54.7, weights 14.2, ...`: the parts above a twentieth of the total, in GiB."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {gib(size)}" for name, size in parts if size >= self.total / 20)

    def shortage(self, device: Device) -> float:
        """Bytes that the device lacks; negative if it fits."""
        return self.total - device.memory_bytes


def colocated_phases(roles: Iterable[RoleMemory], device: Device | None = None) -> list[Phase]:
    """The phases of roles that share devices: what all keep, what one needs, and what a process on `device` takes."""
    roles = list(roles)
    resident = {ENGINES: float(device.reserved_bytes)} if device else {}
    for role in roles:
        resident |= role.resident
    return [Phase(name, resident | dict(parts)) for role in roles for name, parts in role.phases.items()]


def gib(size: float) -> str:
    """The size in GiB, without the unit."""
    return f"{size / GIB:.1f}"
