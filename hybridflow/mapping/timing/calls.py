"""Seconds of a call of an engine, of any kind."""

from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.timing.generation import generation_seconds
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.training import forward_seconds, update_seconds
from hybridflow.mapping.workload import Workload


def call_seconds(
    kind: OperationKind, use: ModelUse, layout: TrainingLayout | RolloutLayout, workload: Workload, cluster: Cluster
) -> Seconds:
    """Seconds of an update, a forward pass or a generation; processes that share cores take longer."""
    if isinstance(layout, RolloutLayout):
        found = generation_seconds(use, layout, workload, cluster)
    else:
        compute = update_seconds if kind is OperationKind.update else forward_seconds
        found = compute(use, layout, workload, cluster)
    return found.scaled(cluster.crowding)
