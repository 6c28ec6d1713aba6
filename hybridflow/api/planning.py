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
from hybridflow.errors import Advice, HybridflowError, Problems
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.dry_run import examine, role_rows, say_examined
from hybridflow.launch.planning import plan_on
from hybridflow.mapping.explanation import placements, step_facts
from hybridflow.mapping.explanation_text import text_of
from hybridflow.mapping.figure import svg_of
from hybridflow.mapping.memory.phases import GIB
from hybridflow.mapping.planner import Answer
from hybridflow.observability.logs import configure_logging, logging_restored

Compose = Callable[[Inputs, Problems], tuple[Composed, bool]]
"""Composes a run with its objects stored among the inputs; also returns whether the roles fit on the devices."""


class Prediction:
    """The step of a run with the shortest predicted time on some devices. Its text is what `hybridflow plan` prints.

    predicted = hybridflow.plan("grpo", {"model.path": "Qwen3-32B"}, on="4x8xH100").predicted
    predicted.seconds                      # None if nothing fits
    predicted.calls.to_pandas()
    """

    def __init__(self, found: Answer) -> None:
        self._found = found
        self._best = found.plans[0] if found.plans else None
        self._step = None if self._best is None else step_facts(self._best)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None if the run does not fit on the devices."""
        return None if self._step is None else self._step.seconds

    @property
    def roles(self) -> Table:
        """One row per role: its pool, the devices of the pool, and its layout."""
        pools = [] if self._step is None else self._step.pools
        return Table(
            [
                {"role": role.role, "pool": pool.name, "devices": pool.num_devices, "layout": role.layout}
                for pool in pools
                for role in pool.roles
            ]
        )

    @property
    def calls(self) -> Table:
        """One row per call of the step: role, pool, start, seconds, and whether it is on the critical path."""
        names = ("name", "role", "pool", "start_seconds", "seconds", "is_critical")
        calls = [] if self._step is None else self._step.calls
        return Table([{name: vars(call)[name] for name in names} for call in calls])

    @property
    def memory(self) -> Table:
        """One row per pool and phase of a step: GiB per device, those that stay free, and those of each content."""
        pools = [] if self._step is None else self._step.pools
        rows = []
        for pool in pools:
            for phase in pool.memory:
                sizes = {"gib": phase.total_bytes, "free_gib": phase.free_bytes} | phase.contents
                rows.append({"pool": pool.name, "phase": phase.name} | {k: v / GIB for k, v in sizes.items()})
        return Table(rows)

    @property
    def placements(self) -> Table:
        """The best placements, and the best of each kind, with the seconds of a step."""
        rows = placements(self._found) if self._found.plans else []
        return Table([{"placement": row.name, "kinds": ", ".join(row.kinds), "seconds": row.seconds} for row in rows])

    def __repr__(self) -> str:
        return text_of(self._found).rstrip("\n")

    def _repr_html_(self) -> str:
        drawing = "" if self._best is None else svg_of(self._best)
        return f"{drawing}<pre>{html.escape(repr(self))}</pre>"


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

    predicted: Prediction | None = None
    """The predicted step on the devices given by `on`; None without them, or if there is no plan."""

    def __repr__(self) -> str:
        return self.text if self.predicted is None else repr(self.predicted)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>" if self.predicted is None else self.predicted._repr_html_()


def plan_of(compose: Compose, on: str | None = None) -> Plan:
    """The plan of a run; objects are stored in a temporary folder for the checks.

    With `on`, which is `auto` or a cluster, also its predicted step there.
    """
    problems = Problems(collects=True)
    written = io.StringIO()
    console = Console(file=written, width=120, highlight=False, force_jupyter=False, color_system=None)
    composed, found, predicted = None, None, None
    with logging_restored(), tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        configure_logging(None, logging.WARNING)
        with problems.caught():
            composed, has_layout = compose(Inputs(Path(folder)), problems)
            found = examine(composed, problems, has_layout=has_layout)
        with problems.caught():
            if composed is not None and on is not None:
                predicted = Prediction(plan_on(composed, None if on == "auto" else on)[1])
        plan = None if found is None else found.plan
        roles = Table([] if plan is None else role_rows(plan))
        say_examined(found, problems, console)
    text = written.getvalue().rstrip("\n").replace(f"{Path(folder)}/", f"{INPUTS_FOLDER}/")
    return Plan(tuple(problems.found), tuple(problems.warnings), roles, text, predicted)
