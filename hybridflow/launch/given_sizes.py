"""Given sizes that no plan can satisfy: errors before the search begins, in planned runs and in `hybridflow plan`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridflow.config.derived import divisors
from hybridflow.config.placement import Parallelism
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ROLLOUT
from hybridflow.launch.plan_request import ROLLOUT_SIZES, SIZES, planned_section
from hybridflow.launch.rules.layouts import layout_error, minibatch_problems
from hybridflow.launch.rules.parallelism import engine_errors
from hybridflow.mapping.request import PlannedModel, Request
from hybridflow.models.names.layouts import layout_problem
from hybridflow.observability.formatting import counted


def given_problems(plan: RunPlan, request: Request) -> Iterator[ConfigError]:
    """Minibatches that do not divide the batch, and given sizes that do not fit the devices, or that no engine that may
    be chosen supports."""
    yield from minibatch_problems(plan.config, plan.dataflow)
    training = {role.name: role.training for role in plan.roles}
    for model in request.models:
        sizes = {name: size for name, size in model.given.values.items() if name in SIZES and size > 1}
        own, section = training[model.role], planned_section(plan, model.role)
        too_large = [*_device_problems(section, model.role, sizes, request)]
        yield from too_large
        if sizes and own is not None and not too_large:
            own = replace(own, parallelism=replace(Parallelism(), **sizes))
            engines = sorted(model.engines, key=lambda engine: -len(TRAINING_ENGINES[engine].axes))
            errors = [_error(section, engine, own, model) for engine in engines]
            yield from [error for error in errors if error is not None][:1] if all(errors) else []
    if (rollout := request.rollout) is not None:
        sizes = {name: size for name, size in rollout.given.values.items() if name in ROLLOUT_SIZES and size > 1}
        yield from _device_problems(ROLLOUT, rollout.role, sizes, request)


def _device_problems(section: str, role: str, sizes: Mapping[str, int], request: Request) -> Iterator[ConfigError]:
    """Sizes that do not divide the devices of a given pool, or that need more devices than the run has."""
    if not sizes:
        return
    inner = math.prod(sizes.get(name, 1) for name in ("tensor", "pipeline", "sequence"))
    needed = inner * math.lcm(*(sizes.get(name, 1) for name in ("expert", "replicas")))
    given = " ".join(f"{section}.parallelism.{name}={size}" for name, size in sizes.items())
    pool = request.pinned.get(role, "")
    is_given = pool in request.pool_devices
    if is_given:
        there, where = request.pool_devices[pool], f"pool '{pool}' has"
        is_wrong, found = bool(there % needed), f"{needed:,} does not divide"
    else:
        there, where = request.cluster.num_devices, "the run has"
        is_wrong, found = needed > there, f"{needed:,} devices are more than"
    if is_wrong:
        yield ConfigError(
            f"{given}: {found} the {counted(there, 'device')} that {where}.",
            remedy=f"Use sizes whose product is one of: {', '.join(map(str, divisors(there)))}."
            if is_given
            else f"Use sizes whose product is at most {there:,}, or more devices.",
        )


def _error(section: str, engine: TrainingEngine, training: Training, model: PlannedModel) -> ConfigError | None:
    """Why an engine cannot shard a model in the given sizes."""
    for error in engine_errors(section, replace(training, engine=engine)):
        return error
    problem = layout_problem(model.use.geometry, TRAINING_ENGINES[engine].weights, training.parallelism)
    return None if problem is None else layout_error(section, engine.name, problem, model.use.geometry)
