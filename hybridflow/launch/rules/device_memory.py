"""The memory of the GPUs that a run gets: those of the Ray cluster that it has joined, else of this machine."""

import logging
from collections.abc import Sequence

from hybridflow.config.derived import num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.controller.backends import joined_node_gpus
from hybridflow.controller.resource_pool import NodeGpus, visible_gpu_bytes
from hybridflow.launch.plan.roles import backend_kind

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def least_gpus(config: Experiment) -> NodeGpus | None:
    """The node with the smallest GPUs that the run cannot avoid; None if the memory of no GPU is known."""
    kind, wanted = backend_kind(config), num_devices(config)
    nodes = joined_node_gpus(kind.name)
    if nodes is None:
        sizes = visible_gpu_bytes()
        # The local backend uses the first GPUs; Ray may choose any.
        nodes = NodeGpus.by_size("this machine", sizes[:wanted] if kind is BackendKind.local else sizes)
    return least_unavoidable(nodes, wanted)


def least_unavoidable(nodes: Sequence[NodeGpus], wanted: int) -> NodeGpus | None:
    """The node that provides the last of `wanted` devices if the run gets the largest GPUs of all nodes.

    Logs a warning for nodes of unknown memory, and for those with smaller GPUs, which Ray may choose as well.
    """
    known = sorted((node for node in nodes if node.smallest), key=lambda node: -node.smallest)
    unknown = [node.node for node in nodes if not node.smallest]
    if unknown:
        logger.warning("the memory of GPUs is unknown and not checked on %s", ", ".join(unknown))
    if not known:
        return None
    devices = [node for node in known for _ in range(node.count)]
    least = devices[min(wanted, len(devices)) - 1]
    smaller = [node for node in known if node.smallest < least.smallest]
    if smaller:
        logger.warning(
            "memory is checked for the GPUs of %s; Ray may also choose smaller ones: %s",
            least.node, ", ".join(f"{node.smallest / _GIB:.1f} GiB on {node.node}" for node in smaller),
        )  # fmt: skip
    return least
