"""Runs a step over stand-ins for the workers, and records its calls, their order and their columns."""

import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import cleandoc, getsourcefile
from pathlib import Path

import torch

from hybridflow.batch import Batch
from hybridflow.config.choices import is_own
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.placement import Device
from hybridflow.config.user_code import reporting_exits
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.dataflows.interface import Dataflow, collected, is_in_halves, role_needs
from hybridflow.dataflows.roles import Sampler
from hybridflow.errors import (
    STRICT,
    Advice,
    BatchError,
    ConfigError,
    HybridflowError,
    Problem,
    Problems,
    WorkerError,
    explained,
)
from hybridflow.graph.backend import TracingBackend
from hybridflow.graph.stand_in import MadeUpStream
from hybridflow.graph.trace import Call, PartialRollouts, Trace, TracedRole, held_up, scheduled
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.data import precomputed
from hybridflow.launch.plan.dataflow import calling
from hybridflow.launch.plan.plan import RunPlan, plan_run
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec, is_colocated
from hybridflow.launch.rules.all import STEP_RULES
from hybridflow.launch.rules.step import check_followed, check_versions
from hybridflow.launch.start_roles import start_roles
from hybridflow.observability.metrics import measured
from hybridflow.parallel import ParallelMesh

MOST_SAMPLES = 4
"""A drawing of 16 samples per prompt would show nothing more."""


class NotFollowedError(ConfigError):
    """A step that fails on made-up results. It may still work on real ones."""


def step_problems(plan: RunPlan, rows: Batch | None) -> Iterator[Problem]:
    """The error of a user's own dataflow whose first two steps cannot work; a warning if made-up results may cause it.

    `rows` are some of the run's data; without them, missing columns of a batch are not reported.
    """
    if not is_own(plan.config.dataflow):
        return
    problems = Problems(collects=True)
    try:
        trace_step(plan, rows, problems)
    except NotFollowedError as error:
        yield Advice(error.message, remedy=error.remedy)
    except BatchError:
        if rows is not None:
            raise
    yield from problems.warnings


def plan_to_show(composed: Composed) -> RunPlan:
    """The plan of a run whose step is drawn here, whatever devices the run needs. Raises the errors of its step."""
    is_on_gpu = composed.config.trainer.device is not Device.cpu and torch.cuda.is_available()
    plan = plan_run(composed, device="cuda" if is_on_gpu else "cpu")
    STRICT.check(STEP_RULES, plan)
    return plan


def trace_step(plan: RunPlan, rows: Batch | None = None, problems: Problems = STRICT) -> Trace:
    """Runs one step of the planned dataflow over stand-ins. Starts no worker, reads no data and no model.

    A user's own dataflow runs a second step as well, which is checked but not drawn. With `rows` of the run's data, the
    step can use their further columns. Adds warnings to `problems`.
    """
    config, dataflow, settings = plan.config, plan.dataflow, plan.settings
    backend = TracingBackend()
    roles = [replace(role, mesh=ParallelMesh({"data": 1}), generation_mesh=None) for role in plan.roles]
    partial = _partial_rollouts(plan)
    groups = start_roles(roles, {name: ResourcePool(name, 1) for name in plan.pools}, backend)
    backend.forget()
    stream, texts = MadeUpStream(dataflow.data, rows), MadeUpStream("demonstrations")
    samples = min(config.rollout.samples_per_prompt, MOST_SAMPLES)
    with _explained(config.dataflow, dataflow, settings):
        with calling(dataflow, "__init__"):
            program = dataflow(groups, settings=settings, samples_per_prompt=samples)
        program.wants_old_logprobs = plan.wants_old_logprobs
        program.filters_ahead = partial is not None and partial.filters
        program.streams = {"prompts": stream, "pretraining": texts}
        calls = _stepped(config, program, stream.next(), backend)
        check_followed(plan, program, calls, problems)
        if is_own(config.dataflow):
            program.iteration = 1
            check_versions(config, program, calls, _stepped(config, program, stream.next(), backend))
    return Trace(
        title=config.dataflow.rpartition("/")[2],
        purpose=cleandoc(dataflow.__doc__ or "").partition("\n")[0],
        calls=scheduled(calls),
        roles=tuple(planned_roles(plan)),
        pools=plan.pools,
        data=("sample_index", *stream.columns, *texts.columns),
        held_up=held_up(calls),
        lag=config.asynchrony.depth,
        partial=partial,
    )


def _partial_rollouts(plan: RunPlan) -> PartialRollouts | None:
    if not plan.config.asynchrony.partial_rollouts:
        return None
    overlaps = plan.backend is BackendKind.ray and not is_colocated(plan.config)
    return PartialRollouts(overlaps, filters=plan.dataflow.filter_out is not Dataflow.filter_out)


def _stepped(config: Experiment, program: Dataflow, prompts: Batch, backend: TracingBackend) -> tuple[Call, ...]:
    """The calls of one step on these prompts, with the columns that the user's `precompute` adds."""
    if is_own(config.dataflow):
        prompts = prompts.join(precomputed(program, prompts))
        backend.forget()
    owner = type(program).__name__
    if not is_in_halves(type(program)):
        measured(program.step(prompts), owner=f"{owner}.step")
        return tuple(backend.calls)
    backend.is_ahead = True
    batch = collected(program, prompts)
    backend.is_ahead = False
    measured(program.learn(batch), owner=f"{owner}.learn")
    return tuple(backend.calls)


@contextmanager
def _explained(name: str, dataflow: type[Dataflow], settings: object) -> Iterator[None]:
    """Turns an error of user code into a `ConfigError` with its line; errors of hybridflow pass unchanged."""
    try:
        with reporting_exits(f"dataflow={name}: its step", callers={__file__}):
            yield
    except BatchError as error:
        place = _place(dataflow, error)
        raise BatchError(f"{error.message.rstrip('.')}{place}.", remedy=error.remedy) from error
    except WorkerError as error:
        shown = explained(error)
        shown.message = f"{shown.message.rstrip('.')}{_place(dataflow, error)}."
        raise
    except HybridflowError:
        raise
    except AttributeError as error:
        raise _misspelt(name, dataflow, settings, error) from error
    except (NameError, ImportError) as error:
        if isinstance(error, UnboundLocalError):
            raise _cannot_follow(name, dataflow, error) from error
        raise ConfigError(
            f"dataflow={name}: its step fails: {_described(dataflow, error)}.",
            remedy="Define or import it; no value in the run can make that line work.",
        ) from error
    except Exception as error:
        raise _cannot_follow(name, dataflow, error) from error


def planned_roles(plan: RunPlan) -> list[TracedRole]:
    """The roles that the dataflow names, and what runs each; those that the run does without have no pool."""
    planned = {role.name: role for role in plan.roles}
    actor, roles = planned.get(ACTOR), []
    assert plan.config.rollout.engine is not None, "the device's defaults are not filled in"
    rollout = plan.config.rollout.engine.rpartition("/")[2]
    for name, need in role_needs(plan.dataflow).items():
        kind, role = need.kind.__name__, planned.get(name)
        if role is None and need.kind is Sampler and actor is not None and actor.generates:
            layout = _replicas(actor.generation_mesh)
            roles.append(TracedRole(name, kind, actor.pool, f"{rollout}, in {ACTOR}", layout))
        elif role is None:
            roles.append(TracedRole(name, kind, None, "", {}))
        else:
            layout = _replicas(role.mesh) if name == ROLLOUT else _axes(_sizes(role))
            roles.append(TracedRole(name, kind, role.pool, _engine(role, rollout), layout))
    return roles


def _engine(role: RoleSpec, rollout: str) -> str:
    """The engine of the role."""
    if role.view_of is not None:
        return f"in {role.view_of}, without its adapter"
    if role.training is not None:
        return role.training.engine.name
    return rollout if role.model is not None else "functions"


def _replicas(mesh: ParallelMesh | None) -> dict[str, int]:
    """The number of engines that generate, and the devices of each."""
    if mesh is None:
        return {}
    inner = {axis: mesh.axis_size(axis) for axis in ("pipeline", "tensor")}
    return _axes({"replicas": mesh.size // math.prod(inner.values()), **inner})


def _sizes(role: RoleSpec) -> Mapping[str, int]:
    """The sizes of a role's mesh; functions have rows only along `data`."""
    is_of_functions = role.reward is not None and role.training is None
    return {"data": role.mesh.axis_size("data")} if is_of_functions else role.mesh.sizes


def _axes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1}


def _misspelt(name: str, dataflow: type[Dataflow], settings: object, error: AttributeError) -> ConfigError:
    """The error for a setting or a role that the dataflow does not have; it would also occur on real results."""
    hint = None
    if error.obj is settings:
        known, read = [field.name for field in fields(dataflow.Settings)], "self.settings"
        bases = (base for base in dataflow.__mro__ if issubclass(base, Dataflow))
        owners = [base.__name__ for base in bases if error.name in {field.name for field in fields(base.Settings)}]
        hint = f"Extend those of {owners[0]}: class Settings({owners[0]}.Settings). " if owners else None
    elif isinstance(error.obj, dataflow):
        known, read = [*role_needs(dataflow), *vars(error.obj)], "self"
    else:
        return _cannot_follow(name, dataflow, error)
    hint = hint or did_you_mean(error.name or "", known)
    return ConfigError(
        f"dataflow={name}: it reads {read}.{error.name}, which does not exist{_place(dataflow, error)}.",
        remedy=f"{hint}It has: {', '.join(dict.fromkeys(known)) or 'nothing'}.",
    )


def _place(dataflow: type[Dataflow], error: Exception) -> str:
    """The innermost line of the dataflow's own file that an error came through."""
    file = getsourcefile(dataflow)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _described(dataflow: type[Dataflow], error: Exception) -> str:
    return f"{type(error).__name__}: {error}{_place(dataflow, error)}"


def _cannot_follow(name: str, dataflow: type[Dataflow], error: Exception) -> NotFollowedError:
    return NotFollowedError(
        f"dataflow={name}: its step cannot be traced: {_described(dataflow, error)}.",
        remedy="The trace runs `step` twice on made-up prompts, with made-up results and no metrics. Fix the step; if"
        " it is right, make it accept missing metrics and missing columns of the data.",
    )
