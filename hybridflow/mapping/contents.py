"""The contents of a memory in one phase of a step, by kind, for the explanation of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.mapping.changes import IN_HOST_MEMORY
from hybridflow.mapping.memory.phases import ENGINES, Phase

TIGHT = 0.05
"""Less free memory than this fraction of the used memory is not reliable: predictions may be wrong by about as much."""

CONTENTS = {
    "weights": ("weights of ",),
    "optimizer": ("optimizer of ",),
    "gradients": ("gradients",),
    "activations": ("activations", "logits"),
    "KV cache": ("cache",),
    "buffers": ("",),
}
"""The kinds of contents of a device's memory, by the beginnings of the parts' names; the last takes all others."""

HOST_CONTENTS = {name: CONTENTS[name] for name in ("weights", "optimizer")} | {
    "copies": ("copies of ",),
    "buffers": ("",),
}
"""The same for host memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryPhase:
    """One phase of a step on a device of a pool."""

    name: str
    total_bytes: float
    free_bytes: float
    """Negative if it does not fit."""

    parts_bytes: dict[str, float]

    @property
    def contents(self) -> dict[str, float]:
        """Bytes of each kind of contents, without what the process itself takes."""
        return by_kind(self.parts_bytes, HOST_CONTENTS if self.name == IN_HOST_MEMORY else CONTENTS)

    @classmethod
    def of(cls, phase: Phase, missing_bytes: float) -> "MemoryPhase":
        """The phase on a device that lacks so many bytes (negative: has them free); the largest part first."""
        parts = dict(sorted(phase.parts.items(), key=lambda part: -part[1]))
        return cls(name=phase.name, total_bytes=phase.total, free_bytes=-missing_bytes, parts_bytes=parts)


def by_kind(parts: Mapping[str, float], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The bytes of each kind of contents, given those of its parts."""
    sizes = dict.fromkeys(kinds, 0.0)
    for part, size in parts.items():
        if part != ENGINES:
            sizes[next(name for name, starts in kinds.items() if part.startswith(starts))] += size
    return sizes
