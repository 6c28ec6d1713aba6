"""The faults of a run as a table: what happened, what was done about it, and what it cost."""

import json
import math
from collections.abc import Sequence

from hybridflow.observability import formatting
from hybridflow.observability.fault_ledger import FAULTS_FILE, Fault
from hybridflow.observability.printable import shown
from hybridflow.observability.report.document import html_table

_MOST_CHARACTERS = 160
"""The length at which the message of a fault is cut; the whole message appears under the pointer."""


def faults_section(faults: Sequence[Fault], seconds: float) -> str:
    """A table of the faults of a run whose steps took `seconds`; empty without faults.

    Its `data-faults` are the places and texts that the script of the page shows next to the pointer.
    """
    if not faults:
        return ""
    cost = math.fsum(fault.cost_seconds for fault in faults)
    lost = f" {formatting.spoken_duration(cost)} were lost to them" if cost else ""
    share = f", {formatting.percent(cost, cost + seconds)} of the run's time" if cost and seconds else ""
    note = f"Dashed lines mark the faults on the curves.{lost}{share}{'.' if lost else ''}"
    marks = [[fault.at, f"fault in step {fault.step} ({fault.kind}): {fault.outcome}"] for fault in faults]
    titles = ["step", "kind", "fault", "outcome", "cost"]
    data = shown(json.dumps(marks, separators=(",", ":")))
    return (
        f'<section id="faults" data-faults="{data}"><h2>Faults</h2><p class="note">{note} {FAULTS_FILE} has the'
        f" details.</p>{html_table('faults', titles, map(_row, faults))}</section>"
    )


def _row(fault: Fault) -> str:
    words = " ".join(fault.message.split())
    cut = words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}\u2026"
    what = f'<span title="{shown(words)}">{shown(cut)}</span>'
    place = f"<br/><small>{shown(': '.join(filter(None, (fault.name, fault.place))))}</small>"
    outcome = shown(fault.outcome) if fault.is_survived else f'<b class="wrong">{shown(fault.outcome)}</b>'
    cost = formatting.spoken_duration(fault.cost_seconds) if fault.is_survived else ""
    return "".join(f"<td>{cell}</td>" for cell in (str(fault.step), shown(fault.kind), f"{what}{place}", outcome, cost))
