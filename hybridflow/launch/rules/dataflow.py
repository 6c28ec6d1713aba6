"""The rules that need the dataflow's class alone."""

from hybridflow.config.checks import check_placement
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.errors import STRICT, Faults
from hybridflow.launch.plan.roles import CRITIC
from hybridflow.launch.rules.algorithm import algorithm_errors
from hybridflow.launch.rules.parallelism import role_errors


def check_dataflow(config: Experiment, dataflow: type[Dataflow], faults: Faults = STRICT) -> None:
    """Adds a `ConfigError` for each rule that needs the dataflow's class and that the configuration breaks."""
    faults.add(*algorithm_errors(config, dataflow))
    with faults.caught():
        if CRITIC in role_needs(dataflow):
            check_placement(config)
            faults.add(*role_errors(config, CRITIC))
