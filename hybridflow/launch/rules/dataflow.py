"""All rules that need the dataflow's class, in the order in which a run checks them."""

from hybridflow.config.checks import check_critic
from hybridflow.config.experiment import Experiment
from hybridflow.config.layout_checks import check_replicas
from hybridflow.dataflows.interface import Dataflow, learns_from_samples, role_needs
from hybridflow.launch.roles import CRITIC
from hybridflow.launch.rules.algorithm import algorithm_errors


def check_dataflow(config: Experiment, dataflow: type[Dataflow]) -> None:
    """Raises `ConfigError` for the first rule that needs the dataflow's class and that the configuration breaks."""
    for error in algorithm_errors(config, dataflow):
        raise error
    if learns_from_samples(dataflow):
        check_replicas(config)
    if CRITIC in role_needs(dataflow):
        check_critic(config)
