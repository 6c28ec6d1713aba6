"""Rules on partial rollouts: which runs have rows that can continue with new weights, and which can be repeated."""

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config.choices import is_own
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.schedule import recorded_steps
from hybridflow.engines.rollout.custom import CustomEngine, custom_engine
from hybridflow.environments.stages import runs_in_processes
from hybridflow.errors import Advice, ConfigError, Problem
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.rules.asynchrony import division_problems

_PARTIAL = "asynchrony.partial_rollouts=true"


def partial_rollout_problems(plan: RunPlan) -> Iterator[Problem]:
    """Rows that cannot continue from call to call, deadlines that never pass, and schedules that cannot be repeated."""
    config = plan.config
    if not config.asynchrony.partial_rollouts:
        yield from _filter_problems(plan)
        return
    if not config.asynchrony.max_staleness:  # otherwise one of the rules on older samples
        yield from division_problems(plan, _PARTIAL, key="asynchrony.partial_rollouts")
    yield from _engine_problems(config)
    deadline, longest = config.asynchrony.deadline_tokens, config.data.max_response_tokens
    if deadline is not None and deadline >= longest:
        yield Advice(
            f"asynchrony.deadline_tokens={deadline} is not below data.max_response_tokens={longest}: a response ends"
            " before this deadline, unless it waits for a place in the engine.",
            remedy="Set a lower deadline, or leave asynchrony.deadline_tokens out.",
        )
    if config.asynchrony.replay is not None:
        if config.environment.chosen is not None and runs_in_processes(config.environment):
            yield ConfigError(
                f"asynchrony.replay={config.asynchrony.replay} with {config.environment.chosen} in processes, which do"
                " not answer at the same moments again.",
                remedy="Set environment.processes=0 in both runs, or leave asynchrony.replay out.",
                key="asynchrony.replay",
                among=["environment.processes", "asynchrony.replay"],
            )
        recorded = len(recorded_steps(Path(config.asynchrony.replay)))
        if recorded < config.trainer.total_steps:
            yield ConfigError(
                f"asynchrony.replay={config.asynchrony.replay} has {recorded} steps, and this run"
                f" trainer.total_steps={config.trainer.total_steps}.",
                remedy=f"Set trainer.total_steps={recorded}, the number of steps to repeat.",
                key="asynchrony.replay",
                among=["asynchrony.replay", "trainer.total_steps"],
            )


def _filter_problems(plan: RunPlan) -> Iterator[Advice]:
    """A user's `filter_out`, which nothing calls in a run without partial rollouts; DAPO then fills up its batch."""
    if plan.dataflow.filter_out in (Dataflow.filter_out, DAPO.filter_out):
        return
    yield Advice(
        f"{plan.dataflow.__name__}.filter_out has no effect: asynchrony.partial_rollouts=false trains on all groups.",
        remedy="Set asynchrony.partial_rollouts=true, or remove filter_out.",
    )


def _engine_problems(config: Experiment) -> Iterator[Problem]:
    """An engine of the user's that only generates whole batches, or rows to their ends in spite of a deadline."""
    name = config.rollout.engine
    if name is None or not is_own(name):
        return
    engine, deadline = custom_engine(name), config.asynchrony.deadline_tokens
    if "submit" not in dir(engine):
        yield ConfigError(
            f"{_PARTIAL}: rollout.engine={name} has no method submit, so its rows cannot continue after an update.",
            remedy="Derive it from hybridflow.engines.rollout.custom.CustomEngine, or use"
            " asynchrony.partial_rollouts=false.",
            key="rollout.engine",
        )
    elif deadline is not None and isinstance(engine, type) and issubclass(engine, CustomEngine):
        yield Advice(
            f"asynchrony.deadline_tokens={deadline} cuts off no response: rollout.engine={name} generates rows to their"
            " ends, and each call of its method respond counts as one decoding step.",
            remedy="Leave out asynchrony.deadline_tokens, and limit responses by data.max_response_tokens.",
        )
