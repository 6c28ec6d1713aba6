"""`--dry-run`: the problems of a run all at once, and what it would consist of; no role is started.

What depends on an earlier run in its directory (a checkpoint to resume from) is left to the start.
"""

from rich.console import Console
from rich.table import Table

from hybridflow.config.derived import pool_sizes
from hybridflow.errors import Faults, HybridflowError
from hybridflow.launch.checked_plan import RunPlan, plan_run
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.failure import say_problems
from hybridflow.launch.plan.roles import ROLLOUT, RoleSpec
from hybridflow.launch.prepare import check_directory, read_data, tell
from hybridflow.models.geometry import parameter_count, read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.observability import formatting
from hybridflow.observability.logs import configure_logging


def dry_run(composed: Composed, faults: Faults, console: Console) -> None:
    """Prints the problems that the plan, the models, the data and the functions have, and then the roles."""
    configure_logging(None)
    told = len(faults.found)
    plan = None
    with faults.caught():
        plan = plan_run(composed, faults)
        tell(plan)
    if plan is not None:
        with faults.caught():
            read_data(plan, faults)
        with faults.caught():
            check_directory(plan)
    say_problems(faults.found, console, begin=told)
    console.print("models and data are looked at once these are mended" if plan is None else _roles(plan))


def _roles(plan: RunPlan) -> Table:
    """One line per role: where it lives, how it is laid out, and how large it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("role", "pool", "devices", "engine", "layout", "parameters", "update rows"):
        table.add_column(column, no_wrap=column != "layout")
    sizes = pool_sizes(plan.config)
    for spec in plan.specs:
        rows = "" if spec.minibatch_rows is None else str(spec.minibatch_rows)
        row = spec.name, spec.pool, str(sizes[spec.pool]), _engine(plan, spec), _layout(spec), _parameters(spec), rows
        table.add_row(*row)
    return table


def _engine(plan: RunPlan, spec: RoleSpec) -> str:
    """`fsdp + vllm` for an actor that generates."""
    rollout = plan.config.rollout.engine
    generates = [rollout.name] if rollout and (spec.generation_mesh or spec.name == ROLLOUT) else []
    trains = [] if spec.training is None else [spec.training.engine.name]
    return " + ".join(trains + generates) or (f"that of {spec.view_of}" if spec.view_of else "functions")


def _layout(spec: RoleSpec) -> str:
    """`data 4, tensor 2`: the axes along which ranks are laid out."""
    sizes = {} if spec.mesh is None else {axis: size for axis, size in spec.mesh.sizes.items() if size > 1}
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "1 rank"


def _parameters(spec: RoleSpec) -> str:
    """How many its model has; nothing where there is no model, or none that can be read (a problem of its own)."""
    if spec.model is None:
        return ""
    try:
        return formatting.count(parameter_count(read_geometry(resolve_model_path(str(spec.model.path)))))
    except HybridflowError:
        return "?"
