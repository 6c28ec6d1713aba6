"""What a run will be, worked out from its configuration before anything starts, and the rules that it must keep."""

from dataclasses import dataclass

from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import STRICT, Faults
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.dataflow import find_dataflow, make_settings
from hybridflow.launch.plan.device import find_device
from hybridflow.launch.plan.device_defaults import with_device_defaults
from hybridflow.launch.plan.horizon import check_horizon, with_schedule_steps
from hybridflow.launch.plan.roles import RoleSpec, plan_roles
from hybridflow.launch.rules.batches import batch_errors
from hybridflow.launch.rules.dataflow import check_dataflow
from hybridflow.launch.rules.parallelism import check_parallelism
from hybridflow.launch.rules.preflight import check_methods, check_run
from hybridflow.observability.trackers.factory import check_names


@dataclass(frozen=True)
class RunPlan:
    """A run as planned: its configuration with the device's defaults, its dataflow, and its roles."""

    composed: Composed
    device: str
    """`cpu` or `cuda`."""

    dataflow: type[Dataflow]
    settings: object
    """The dataflow's `Settings`."""

    specs: list[RoleSpec]

    @property
    def config(self) -> Experiment:
        """The whole configuration."""
        return self.composed.config


def plan_run(composed: Composed, faults: Faults = STRICT) -> RunPlan:
    """The plan of a composed run. Starts nothing, and reads no data.

    Adds the errors of rules to `faults`; raises `HybridflowError` for what leaves no plan, such as a dataflow that is
    not there.
    """
    with faults.caught():
        check_names(composed.config.trainer.trackers)
    dataflow = find_dataflow(composed.config.dataflow)
    settings = make_settings(dataflow, composed.config.dataflow_settings)
    check_dataflow(composed.config, dataflow, faults)
    check_parallelism(composed.config)  # no roles without it; where faults are collected, they were told before
    device = find_device(composed.config)
    composed = with_schedule_steps(with_device_defaults(composed, device))
    config = composed.config
    plan = RunPlan(composed, device, dataflow, settings, plan_roles(config, dataflow))
    faults.add(*batch_errors(config, dataflow, plan.specs))
    with faults.caught():
        check_methods(config, dataflow, plan.specs)
    with faults.caught():
        check_run(config, plan.specs, device)
    with faults.caught():
        check_horizon(config, [spec.name for spec in plan.specs if spec.is_trained])
    return plan
