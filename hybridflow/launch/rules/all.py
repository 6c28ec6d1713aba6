"""All rules of a run, in the order in which they are checked. Each yields the problems that it finds.

Rules on the configuration alone need no torch, so they come first: those of `config/checks.py` as it is composed, then
`parallelism.py`.
"""

from collections.abc import Iterator

from hybridflow.errors import Problem
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.rules import (
    algorithm,
    asynchrony,
    elastic,
    environment,
    layouts,
    memory,
    models,
    partial_rollouts,
    resources,
)
from hybridflow.launch.rules.unused_settings import unused_settings

_DRAWN = (algorithm.algorithm_problems, layouts.critic_layout_problems, layouts.placement_problems)
DATAFLOW_RULES = (algorithm.estimator_problems, *_DRAWN)
"""Rules that need only the configuration and the dataflow's class, not a plan."""


def _dataflow_problems(plan: RunPlan) -> Iterator[Problem]:
    for rule in _DRAWN:
        yield from rule(plan.config, plan.dataflow)


def _estimator_problems(plan: RunPlan) -> Iterator[Problem]:
    yield from algorithm.estimator_problems(plan.config, plan.dataflow)


STEP_RULES = (
    _dataflow_problems,
    asynchrony.asynchrony_problems,
    asynchrony.interpolation_problems,
    partial_rollouts.partial_rollout_problems,
    layouts.batch_problems,
)
"""Rules on the plan of the run that also apply when a step is only drawn, which the estimator does not change."""

PLAN_RULES = (
    _estimator_problems,
    *STEP_RULES,
    algorithm.gradient_problems,
    algorithm.reward_weight_problems,
    elastic.elastic_problems,
    resources.pool_problems,
    resources.tracker_problems,
    resources.engine_problems,
    models.directory_problems,
    models.tokenizer_problems,
    models.stop_problems,
    models.reward_model_problems,
    environment.environment_problems,
    layouts.layout_problems,
    models.adapter_problems,
    models.rollout_problems,
    memory.memory_problems,
    resources.checkpoint_problems,
    unused_settings,
    algorithm.minibatch_advice,
)
"""Rules from the plan of the run."""

LENGTH_RULES = (algorithm.schedule_problems, resources.run_directory_problems)
"""Rules from the plan of the run that read its total steps."""

DATA_RULES = (models.reward_problems, layouts.evaluation_problems, algorithm.precomputing_problems)
"""Rules from the plan and the data."""
