"""Seconds of an operation, by cause."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """Seconds of an operation as parts that follow one another: what overlaps with another part is not counted."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return sum(self.parts.values())

    def with_part(self, name: str, seconds: float) -> "Seconds":
        """These seconds with one more part."""
        return Seconds({**self.parts, name: seconds})

    def scaled(self, factor: float) -> "Seconds":
        """Each part multiplied."""
        return self if factor == 1.0 else Seconds({name: part * factor for name, part in self.parts.items()})
