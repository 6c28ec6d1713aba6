"""Plans for tests, and the problems that rules find in them."""

from collections.abc import Callable, Iterable

from hybridflow.config.experiment import Experiment
from hybridflow.errors import Advice, HybridflowError, Problem, Problems
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.plan.plan import RunPlan, plan_run


def planned(*words: str, name: str = "ppo", device: str = "cpu") -> RunPlan:
    """The plan of a command line."""
    return plan_run(compose_run(words, config_name=name), device=device)


def plan_of(config: Experiment, device: str = "cpu") -> RunPlan:
    """The plan of a configuration."""
    origins = dict.fromkeys(Composed(config, {}).flat(), "default")
    return plan_run(Composed(config, origins), device=device)


def judged(plan: RunPlan, *rules: Callable[..., Iterable[Problem]]) -> list[Advice]:
    """The warnings of rules; raises the first error."""
    problems = Problems(collects=True)
    problems.check(rules, plan)
    for error in problems.found:
        raise error
    return problems.warnings


def errors(plan: RunPlan, *rules: Callable[..., Iterable[Problem]]) -> list[HybridflowError]:
    """The errors of rules."""
    problems = Problems(collects=True)
    problems.check(rules, plan)
    return problems.found
