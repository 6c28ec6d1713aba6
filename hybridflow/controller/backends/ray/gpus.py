"""Memory of the GPUs of a cluster, which its nodes are asked for before anything of a run starts."""

import logging
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.backends.ray.cluster import is_joined
from hybridflow.controller.backends.ray.host import GPU_ENVIRONMENT, python_path
from hybridflow.controller.resource_pool import NodeGpus, visible_gpu_bytes

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 60.0


def joined_node_gpus(read: Callable[[], list[int]] = visible_gpu_bytes) -> list[NodeGpus] | None:
    """The nodes of the joined cluster that have GPUs, once for each size of GPU; None if no cluster is joined.

    Each node runs `read` in a process that sees all its GPUs, holds no resource and ends with its answer: what Ray
    itself knows, a name such as A100, stands for cards of several sizes.
    """
    if not ray.is_initialized() or not is_joined():
        return None
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    environment = {"runtime_env": {"env_vars": {"PYTHONPATH": python_path()} | GPU_ENVIRONMENT}}
    remote = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(read)
    asked = [
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), **environment
        ).remote()
        for node in nodes
    ]
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
    for answer in late:
        ray.cancel(answer)
    return [
        gpus
        for node, answer in zip(nodes, asked, strict=True)
        for gpus in _of_node(
            f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            int(node["Resources"]["GPU"]),
            _sizes(answer) if answer in ready else [],
        )
    ]


def _of_node(name: str, count: int, sizes: list[int]) -> list[NodeGpus]:
    """Where Ray does not give out all GPUs that the node sees, any of them may be the smallest."""
    return NodeGpus.by_size(name, sizes) if len(sizes) == count else [NodeGpus(name, count, min(sizes, default=0))]


def _sizes(answer: ray.ObjectRef) -> list[int]:
    try:
        return ray.get(answer)
    except RayError as error:
        logger.info("a node could not read the memory of its GPUs: %s", str(error).strip().splitlines()[-1])
        return []
