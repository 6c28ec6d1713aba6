"""Settings that no search can satisfy, for `hybridflow plan`: the errors that the run itself would have."""

from collections.abc import Iterator
from dataclasses import replace

from hybridflow.config.placement import Parallelism
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan_request import SIZES, planned_section
from hybridflow.launch.rules.layouts import layout_error, minibatch_problems
from hybridflow.launch.rules.parallelism import engine_errors
from hybridflow.mapping.request import PlannedModel, Request
from hybridflow.models.names.layouts import layout_problem


def given_problems(plan: RunPlan, request: Request) -> Iterator[ConfigError]:
    """Minibatches that do not divide the batch, and given sizes that no engine that may be chosen supports."""
    yield from minibatch_problems(plan.config, plan.dataflow)
    training = {role.name: role.training for role in plan.roles}
    for model in request.models:
        sizes = {name: size for name, size in model.given.values.items() if name in SIZES and size > 1}
        own = training[model.role]
        if sizes and own is not None:
            own = replace(own, parallelism=replace(Parallelism(), **sizes))
            engines = sorted(model.engines, key=lambda engine: -len(TRAINING_ENGINES[engine].axes))
            errors = [_error(planned_section(plan, model.role), engine, own, model) for engine in engines]
            yield from [error for error in errors if error is not None][:1] if all(errors) else []


def _error(section: str, engine: TrainingEngine, training: Training, model: PlannedModel) -> ConfigError | None:
    """Why an engine cannot shard a model in the given sizes."""
    for error in engine_errors(section, replace(training, engine=engine)):
        return error
    problem = layout_problem(model.use.geometry, TRAINING_ENGINES[engine].weights, training.parallelism)
    return None if problem is None else layout_error(section, engine.name, problem, model.use.geometry)
