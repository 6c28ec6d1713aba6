"""All rules of a run, in the order in which a run meets them. Each yields the problems that it finds.

Rules on the configuration alone need no torch, so they come first: those of `config/checks.py` as it is composed, then
`parallelism.py`.
"""

from collections.abc import Iterator

from hybridflow.errors import Problem
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.rules.algorithm import (
    algorithm_problems,
    gradient_problems,
    minibatch_advice,
    reward_weight_problems,
    schedule_problems,
)
from hybridflow.launch.rules.layouts import (
    batch_problems,
    critic_layout_problems,
    evaluation_problems,
    layout_problems,
)
from hybridflow.launch.rules.memory import memory_problems
from hybridflow.launch.rules.models import (
    adapter_problems,
    directory_problems,
    reward_model_problems,
    reward_problems,
    rollout_problems,
    tokenizer_problems,
)
from hybridflow.launch.rules.resources import (
    checkpoint_problems,
    package_problems,
    pool_problems,
    run_directory_problems,
)
from hybridflow.launch.rules.unused_settings import unused_settings

DATAFLOW_RULES = (algorithm_problems, critic_layout_problems)
"""Rules from the configuration and the dataflow's class, for which no plan is needed."""


def _dataflow_problems(plan: RunPlan) -> Iterator[Problem]:
    for rule in DATAFLOW_RULES:
        yield from rule(plan.config, plan.dataflow)


STEP_RULES = (_dataflow_problems, batch_problems)
"""Rules from the plan of the run that a drawing of its step needs, too."""

PLAN_RULES = (
    *STEP_RULES,
    gradient_problems,
    reward_weight_problems,
    pool_problems,
    package_problems,
    directory_problems,
    tokenizer_problems,
    reward_model_problems,
    layout_problems,
    adapter_problems,
    rollout_problems,
    memory_problems,
    schedule_problems,
    checkpoint_problems,
    unused_settings,
    minibatch_advice,
    run_directory_problems,
)
"""Rules from the plan of the run."""

DATA_RULES = (reward_problems, evaluation_problems)
"""Rules from the plan and the data."""
