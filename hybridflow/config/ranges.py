"""The numbers that a setting accepts: a `Range` in the type of its field, and the check of all ranges.

gamma: Annotated[float, FROM_0_TO_1] = 1.0
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args, get_origin, get_type_hints

from hybridflow.config.section import Section, sections_of
from hybridflow.errors import STRICT, ConfigError, Problems


@dataclass(frozen=True)
class Range:
    """The finite numbers that a setting accepts. Null is always accepted if the type includes it."""

    fits: Callable[[float], bool]
    words: str
    """Follows "a number" in the documentation: "above 0"."""

    found: str
    remedy: str
    auto: int | None = None
    """The number for which a user may write `auto`."""

    most: float = math.inf
    """The largest number that is accepted, far above any that a run could use: larger ones are typing errors."""

    def check(self, key: str, value: float) -> None:
        """Raises `ConfigError` for a number outside of the range; `key` is the setting, as a user types it."""
        is_float = isinstance(value, float)
        shown = f"{value:g}" if is_float else str(value)
        if (is_float and not math.isfinite(value)) or not self.fits(value):
            raise ConfigError(f"{key}={shown} {self.found}.", remedy=self.remedy)
        if value > self.most:
            raise ConfigError(f"{key}={shown} is too large.", remedy=f"Use {self.most:.0f} or less.")


def at_least(smallest: int, remedy: str = "") -> Range:
    """A range of sizes and counts."""
    remedy = remedy or f"Use {smallest} or more."
    return Range(lambda v: v >= smallest, f"of {smallest} or more", "is too small", remedy)


def number(words: str, fits: Callable[[float], bool], why: str = "") -> Range:
    """A range of other numbers, described by `words` ("above 0"); `why` is appended to the remedy."""
    return Range(fits, words, "is out of range", f"Use a number {words}{why}.")


_MOST = 10**12
AT_LEAST_1, AT_LEAST_0 = replace(at_least(1), most=_MOST), at_least(0)
AT_LEAST_1_OR_AUTO = replace(
    at_least(0, "Use 1 or more, or auto."), words="of 1 or more, or auto (0)", auto=0, most=_MOST
)
FINITE = number("that is finite", lambda v: True)
NOT_BELOW_0 = number("of 0 or more", lambda v: v >= 0)
ABOVE_0 = number("above 0", lambda v: v > 0)
ABOVE_0_OR_NULL = number("above 0", lambda v: v > 0, ", or null")
FROM_0_TO_1 = number("from 0 to 1", lambda v: 0 <= v <= 1)
FROM_0_TO_BELOW_1 = number("from 0 to below 1", lambda v: 0 <= v < 1)
SHARE = number("above 0 and up to 1", lambda v: 0 < v <= 1)


def range_of(hint: object) -> Range | None:
    """The range in a field's type, or in the type of a list's items; None if there is none."""
    items = get_args(hint) if get_origin(hint) is list else (hint,)  # none for a bare typing.List
    return next((part for item in items for part in get_args(item) if isinstance(part, Range)), None)


def check_ranges(config: Section, problems: Problems = STRICT) -> None:
    """Adds a `ConfigError` for each setting of the section, or of sections inside it, that is outside its range.

    If errors are collected, such a setting is reset to its default, so that other rules can compute with it.
    """
    for prefix, section in sections_of(config):
        for name, allowed in _ranges(section):
            known = len(problems.found)
            with problems.caught(f"{prefix}{name}"):
                _check(section, name, allowed, prefix)
            if len(problems.found) > known:
                reset(config, f"{prefix}{name}")


def reset(config: Section, key: str) -> None:
    """Resets a setting to its default, so that other rules can compute with it."""
    for prefix, section in sections_of(config):
        if key.startswith(prefix) and (name := key.removeprefix(prefix)) in vars(section):
            setattr(section, name, vars(type(section)())[name])


def check_fields(settings: object, prefix: str, problems: Problems = STRICT) -> None:
    """Checks the fields of one dataclass, such as a dataflow's `Settings`; `prefix` is prepended to their names."""
    for name, allowed in _ranges(settings):
        with problems.caught():
            _check(settings, name, allowed, prefix)


def _ranges(settings: object) -> Iterator[tuple[str, Range]]:
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if (allowed := range_of(hint)) is not None:
            yield name, allowed


def _check(settings: object, name: str, allowed: Range, prefix: str) -> None:
    value = vars(settings)[name]
    for item in value if isinstance(value, list) else [value]:
        if item is not None:
            allowed.check(f"{prefix}{name}", item)
