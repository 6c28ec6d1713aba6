"""A diagnosis as text: a line per finding, then what to do; or as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from hybridflow.doctor.finding import Finding, Status, plain, what_to_do
from hybridflow.observability.formatting import counted
from hybridflow.observability.redaction import redacted_text

_STYLES = {Status.ok: "green", Status.skipped: "dim", Status.warning: "bold yellow", Status.problem: "bold red"}
_STATUS_WIDTH = max(len(status.value) for status in Status)
_NAME_WIDTH = len("weights megatron")


def line(finding: Finding) -> Text:
    """The line of a finding, and its details below it."""
    text = Text.assemble(
        (finding.status.value.ljust(_STATUS_WIDTH), _STYLES[finding.status]),
        "  ",
        (finding.name.ljust(_NAME_WIDTH), "bold"),
        "  ",
        redacted_text(finding.found),
    )
    for each in finding.details:
        text.append(f"\n{' ' * _STATUS_WIDTH}  {redacted_text(each)}", "dim")
    return text


def conclusion(findings: Sequence[Finding], healthy: str) -> Text:
    """How many problems there are, and what to do, most important first; `healthy` if there is nothing to do."""
    problems, warnings = (sum(each.status is s for each in findings) for s in (Status.problem, Status.warning))
    counts = [counted(number, what) for number, what in ((problems, "problem"), (warnings, "warning")) if number]
    actions = what_to_do(findings)
    if not actions:
        return Text.assemble(("\n" + ", ".join(counts), "bold") if counts else "\n", healthy)
    style = "bold red" if problems else "bold yellow" if warnings else "bold green"
    text = Text.assemble(("\n" + (", ".join(counts) or "no problem"), style), "\n", ("What to do:", "bold"))
    for number, action in enumerate(actions, start=1):
        text.append(f"\n{number:>3}. {redacted_text(action)}")
    return text


def as_json(findings: Iterable[Finding]) -> str:
    """The findings, and what to do."""
    findings = [*findings]
    shown = [_redacted(plain(each)) for each in findings]
    worst = max((each.status for each in findings), key=list(Status).index, default=Status.ok)
    actions = [redacted_text(action) for action in what_to_do(findings)]
    return json.dumps({"status": worst.value, "findings": shown, "what_to_do": actions}, indent=2) + "\n"


def _redacted(fields: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: [redacted_text(line) for line in value] if isinstance(value, tuple) else redacted_text(value)
        for name, value in fields.items()
    }
