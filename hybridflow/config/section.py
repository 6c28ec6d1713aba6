"""Base class of the configuration's sections, which can be traversed and sealed."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeVar

from hybridflow.errors import ConfigError

ORIGIN = "  # origin: "
"""Precedes the origin of each value in the record of a run, which holds all settings, whoever set them."""


class Section:
    """Base class of the configuration's dataclasses. Assigning to a field of a sealed section raises `ConfigError`."""

    word: ClassVar[str | None] = None
    """The field that a single word given for the section sets: `placement=split` sets `placement.kind`."""

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_sealed"):
            raise ConfigError(
                f"The configuration is frozen: {type(self).__name__}.{name} cannot be set to {value!r}.",
                remedy="Set it on the command line, in a file, or in Python; compute per-rank sizes with"
                " config/derived.py.",
            )
        object.__setattr__(self, name, value)


_AnySection = TypeVar("_AnySection", bound=Section)


def sections_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yields a section and all sections inside it, each with the prefix of its keys (`actor.optimizer.`)."""
    yield prefix, section
    for name, value in vars(section).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for row, item in inner:
            if isinstance(item, Section):
                yield from sections_of(item, f"{prefix}{name}.{row}." if row else f"{prefix}{name}.")


def sealed(section: _AnySection) -> _AnySection:
    """Seals a section and all sections inside it, and returns it."""
    for _, inner in sections_of(section):
        vars(inner)["_sealed"] = True
    return section


def leaves(content: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of each leaf of nested mappings; an empty mapping is a leaf."""
    for name, value in content.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value
