"""Known violations that are allowed for now, each with its reason. The list may only get shorter."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.source import Violation

WAIVERS_FILE = Path(__file__).with_name("waivers.toml")


def waivers(text: str) -> dict[tuple[str, str], str]:
    """(rule, subject) -> reason, from the text of waivers.toml."""
    return {(entry["rule"], entry["subject"]): entry["reason"] for entry in tomllib.loads(text).get("waiver", [])}


def unwaived(violations: Iterable[Violation], allowed: Iterable[tuple[str, str]]) -> list[Violation]:
    """The violations that no waiver covers."""
    allowed = set(allowed)
    return [violation for violation in violations if (violation.rule, violation.subject) not in allowed]


def stale(violations: Iterable[Violation], allowed: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The waivers that cover nothing any more and must be taken off the list."""
    return set(allowed) - {(violation.rule, violation.subject) for violation in violations}
