"""All rules that need the dataflow's class, in the order in which a run checks them."""

from collections.abc import Sequence

from hybridflow.config.experiment import Experiment
from hybridflow.config.layout_checks import check_critic_layout
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.launch.roles import CRITIC, RoleSpec
from hybridflow.launch.rules.algorithm import algorithm_errors
from hybridflow.launch.rules.batches import batch_errors, evaluation_errors


def check_dataflow(config: Experiment, dataflow: type[Dataflow]) -> None:
    """Raises `ConfigError` for the first rule that needs the dataflow's class and that the configuration breaks."""
    for error in algorithm_errors(config, dataflow):
        raise error
    if CRITIC in role_needs(dataflow):
        check_critic_layout(config)


def check_batches(config: Experiment, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> None:
    """Raises `ConfigError` for the first rule on batches that the configuration breaks."""
    for error in batch_errors(config, dataflow, specs):
        raise error


def check_evaluation(config: Experiment, specs: Sequence[RoleSpec], *, questions: int, sources: Sequence[str]) -> None:
    """Raises `ConfigError` for the first rule on held-out rows that the data breaks; see `evaluation_errors`."""
    for error in evaluation_errors(config, specs, questions=questions, sources=sources):
        raise error
