"""`--dry-run`: all problems of a run at once, and its roles; nothing is started."""

import logging

from rich.console import Console
from rich.table import Table

from hybridflow.errors import Faults, HybridflowError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.messages import LEFT_TO_CHECK, say_problems, say_warnings
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.launch.prepare import checked_data, checked_plan
from hybridflow.launch.rules.all import DATAFLOW_RULES
from hybridflow.launch.run_directory import start_in_words
from hybridflow.models.geometry import parameter_count
from hybridflow.observability import formatting
from hybridflow.observability.logs import configure_logging


def dry_run(composed: Composed, faults: Faults, console: Console, *, has_layout: bool) -> None:
    """Prints the problems of the plan, the models, the data and the functions, the roles, and how the run starts.

    `has_layout`: the roles fit on the devices. Otherwise there is no plan.
    """
    configure_logging(None, logging.WARNING)
    before = len(faults.found)
    plan, data, start = None, None, None
    with faults.caught():
        plan = checked_plan(composed, faults) if has_layout else None
    if plan is None:
        with faults.caught():
            faults.check(DATAFLOW_RULES, composed.config, find_dataflow(composed.config.dataflow))
    if plan is not None:
        with faults.caught():
            data = checked_data(plan, faults)
    if plan is not None and data is not None:
        with faults.caught():
            start = start_in_words(plan, data)
    say_problems(console, faults.found, begin=before)
    say_warnings(console, faults.warnings)
    console.print(LEFT_TO_CHECK if plan is None else _roles(plan))
    if start is not None and not faults.found:
        console.print(f"The run {start}.", soft_wrap=True)


def _roles(plan: RunPlan) -> Table:
    """One line per role: its pool, its layout and its size."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("role", "pool", "devices", "engine", "layout", "parameters", "update rows"):
        table.add_column(column, no_wrap=column != "layout")
    for role in plan.roles:
        rows = "" if role.minibatch_rows is None else str(role.minibatch_rows)
        place = role.name, role.pool, str(plan.pools[role.pool])
        table.add_row(*place, _engine(plan, role), _layout(role), _parameters(plan, role), rows)
    return table


def _engine(plan: RunPlan, role: RoleSpec) -> str:
    """`fsdp + vllm` for an actor that generates."""
    rollout = plan.config.rollout.engine
    generates = [rollout.name] if rollout and role.generates else []
    trains = [] if role.training is None else [role.training.engine.name]
    return " + ".join(trains + generates) or (f"that of {role.view_of}" if role.view_of else "functions")


def _layout(role: RoleSpec) -> str:
    """`data 4, tensor 2`: the axes along which ranks are laid out."""
    return ", ".join(f"{axis} {size}" for axis, size in role.mesh.sizes.items() if size > 1) or "1 rank"


def _parameters(plan: RunPlan, role: RoleSpec) -> str:
    """The parameter count of its model; empty for a role without one, `?` if the model cannot be read."""
    if role.model is None:
        return ""
    try:
        return formatting.count(parameter_count(plan.models.geometry(role.name)))
    except HybridflowError:
        return "?"
