"""`--dry-run`: all problems of a run at once, and its roles; nothing is started."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from hybridflow.config.choices import is_own
from hybridflow.config.derived import is_of_cpus, optimizer_steps_per_step
from hybridflow.config.experiment import Experiment
from hybridflow.config.placement import Pool
from hybridflow.errors import HybridflowError, Problems
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.messages import LEFT_TO_CHECK, say_problems, say_warnings
from hybridflow.launch.plan.data import file_problems
from hybridflow.launch.plan.dataflow import find_dataflow, make_settings, named_functions
from hybridflow.launch.plan.length import length_in_words
from hybridflow.launch.plan.plan import Models, RunPlan
from hybridflow.launch.plan.roles import ACTOR, unknown_roles
from hybridflow.launch.prepare import checked_data, checked_length, checked_plan
from hybridflow.launch.rules.all import DATAFLOW_RULES
from hybridflow.launch.rules.layouts import minibatch_problems
from hybridflow.launch.rules.models import reward_function_problems
from hybridflow.launch.run_directory import start_in_words
from hybridflow.launch.step_trace import planned_roles
from hybridflow.models.geometry import parameter_count
from hybridflow.observability import formatting
from hybridflow.observability.logs import data_lines_held
from hybridflow.observability.redaction import redacted_text
from hybridflow.observability.trackers.factory import unknown_trackers


@dataclass(frozen=True)
class Examination:
    """A run that is not started: its plan, if it has one, and how it would start."""

    plan: RunPlan | None
    start: str | None
    """How it would treat its directory; None if that cannot be said."""

    length: str | None
    """Its rows, steps and epochs; None without data."""

    data: Sequence[Text]
    """How each file is read, and how many of its rows are kept, in the words of a run."""


def say_examined(found: Examination | None, problems: Problems, console: Console, *, begin: int = 0) -> None:
    """Prints the problems from number `begin`, the warnings, the roles, the data, and how the run would start.

    `found` is None if the run could not be composed.
    """
    say_problems(console, problems.found, begin=begin)
    say_warnings(console, problems.warnings)
    plan = None if found is None else found.plan
    console.print(LEFT_TO_CHECK if plan is None else _overview(plan), soft_wrap=True)
    if found is not None and found.data:
        console.print(Text("\n").join([Text("data", "bold"), *found.data]))
    if found is not None and found.length is not None:
        console.print(found.length, soft_wrap=True)
    if found is not None and found.start is not None and not problems.found:
        console.print(f"The run {found.start}.", soft_wrap=True)


def examine(composed: Composed, problems: Problems, *, has_layout: bool, device: str | None = None) -> Examination:
    """Adds the problems of the plan, the models, the data and the functions to `problems`; starts nothing.

    `has_layout`: the roles fit on the devices. Otherwise there is no plan. `device` is `cpu` or `cuda`, by default what
    `trainer.device` chooses here.
    """
    # A setting with an error was left out, so that its value is not the user's.
    composed = replace(composed, user_keys=composed.user_keys - {error.key for error in problems.found})
    plan, data, start, said = None, None, None, list[Text]()
    has_dataflow = all(error.key != "dataflow" for error in problems.found)
    with problems.caught():
        plan = checked_plan(composed, problems, device=device) if has_layout and has_dataflow else None
    if plan is None:
        _check_unplanned(composed.config, problems, has_dataflow=has_dataflow)
    else:
        with problems.caught(), data_lines_held() as lines:
            data = checked_data(plan, problems)
        said = _data_lines(lines)
        with problems.caught():
            plan = plan if data is None else checked_length(plan, data, problems)
            start = start_in_words(plan, data)
    length = None if plan is None or data is None else length_in_words(plan, data)
    return Examination(plan, start, length, said)


def _check_unplanned(config: Experiment, problems: Problems, *, has_dataflow: bool) -> None:
    """Adds the problems that can be found without a plan."""
    dataflow = None
    problems.check([file_problems], config)
    with problems.caught():
        Models(config, []).directory(ACTOR)
    problems.add(*unknown_trackers(config.trainer.trackers))
    with problems.caught():
        dataflow = find_dataflow(config.dataflow) if has_dataflow else None
    problems.check([minibatch_problems, reward_function_problems], config, dataflow)
    if dataflow is not None:
        with problems.caught():
            make_settings(dataflow, config.dataflow_settings, problems)
        named_functions(config, dataflow, problems)
        problems.check([unknown_roles, *DATAFLOW_RULES], config, dataflow)


def role_rows(plan: RunPlan) -> list[dict[str, str]]:
    """One row per role: its name, its pool with its devices, its number of parameters, its engine and layout."""
    return [
        {
            "role": role.name,
            "pool": role.pool,
            "devices": _devices(plan, role.pool),
            "parameters": _parameters(plan, role.name),
            "runs on": role.runs_on,
        }
        for role in planned_roles(plan)
        if role.pool is not None
    ]


def _devices(plan: RunPlan, pool: str) -> str:
    """The number of a pool's devices; `2 (cpu)` or `4 (accelerator_type:A100)` for a pool with its own kind."""
    given = plan.config.placement.pools.get(pool, Pool())
    kinds = ["cpu"] * is_of_cpus(plan.config, pool) + [given.resource] * (given.resource is not None)
    return f"{plan.pools[pool]}" + (f" ({', '.join(map(str, kinds))})" if kinds else "")


def _overview(plan: RunPlan) -> Text:
    """One line per role: its pool, its size, its engine and layout. Then the sizes of batches and minibatches."""
    found = role_rows(plan)
    lines = formatting.columns([tuple(found[0]), *(tuple(row.values()) for row in found)])
    return Text("\n").join([Text(lines[0], "bold"), *map(Text, [*lines[1:], *_batches(plan)])])


def _batches(plan: RunPlan) -> list[str]:
    """The rows of a step, and those of each trained role's optimizer steps."""
    config, rows = plan.config, plan.dataflow.rows_per_prompt
    if not config.trainer.total_steps:
        return [f"evaluation: samples per prompt {config.rollout.eval_samples_per_prompt}"]
    per_prompt = f"rows per prompt {rows}" if rows else f"samples per prompt {config.rollout.samples_per_prompt}"
    lines = [f"batch: prompts per step {config.data.batch_size}, {per_prompt}"]
    note = " (if the step trains on all rows)" if is_own(config.dataflow) else ""
    for role in plan.roles:
        if role.minibatch_rows is not None and role.training is not None:
            steps = optimizer_steps_per_step(config, role.training)
            size = f"optimizer steps per step {steps}, rows per optimizer step {role.minibatch_rows}"
            lines.append(f"{role.name}: {size}{note}")
    return lines


def _data_lines(logged: Iterable[logging.LogRecord]) -> list[Text]:
    """The lines about the data, each once, without `data=`, which the heading says."""
    lines: dict[str, Text] = {}
    for record in logged:
        message = redacted_text(record.getMessage().removeprefix("data="))
        warning = ("Warning: ", "bold yellow") if record.levelno >= logging.WARNING else ""
        lines[message] = Text.assemble(warning, message)
    return list(lines.values())


def _parameters(plan: RunPlan, name: str) -> str:
    """The parameter count of a role's own model; empty without one, `unknown` if the model cannot be read."""
    if not any(role.name == name and role.model is not None for role in plan.roles):
        return ""
    try:
        return formatting.count(parameter_count(plan.models.geometry(name)))
    except HybridflowError:
        return "unknown"
