"""A run before it starts: its problems, warnings and roles."""

import html
import io
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hybridflow.api.inputs import Inputs
from hybridflow.api.table import Table
from hybridflow.config.stored_inputs import INPUTS_FOLDER
from hybridflow.errors import Advice, Faults, HybridflowError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.dry_run import examine, role_rows, say_examined
from hybridflow.observability.logs import configure_logging, logging_restored

Compose = Callable[[Inputs, Faults], tuple[Composed, bool]]
"""Composes a run with its objects stored among the inputs; also returns whether the roles fit on the devices."""


@dataclass(frozen=True)
class Plan:
    """A run that was checked and not started. Its text is what `--dry-run` prints."""

    problems: tuple[HybridflowError, ...]
    """The errors that keep the run from starting."""

    warnings: tuple[Advice, ...]
    """Settings that will not do what they say, and other advice; the run can start."""

    roles: Table
    """One row per role: its pool, devices, parameters, engine and layout; empty if there is no plan."""

    text: str
    """The text that `--dry-run` prints."""

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def plan_of(compose: Compose) -> Plan:
    """The plan of a run; objects are stored in a temporary folder for the checks."""
    faults = Faults(collects=True)
    written = io.StringIO()
    console = Console(file=written, width=120, highlight=False, force_jupyter=False, color_system=None)
    composed, found = None, None
    with logging_restored(), tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        configure_logging(None, logging.WARNING)
        with faults.caught():
            composed, has_layout = compose(Inputs(Path(folder)), faults)
            found = examine(composed, faults, has_layout=has_layout)
        plan = None if found is None else found.plan
        roles = Table([] if plan is None else role_rows(plan))
        say_examined(found, faults, console)
    text = written.getvalue().rstrip("\n").replace(f"{Path(folder)}/", f"{INPUTS_FOLDER}/")
    return Plan(tuple(faults.found), tuple(faults.warnings), roles, text)
