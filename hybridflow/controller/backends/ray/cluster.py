"""The Ray cluster of a run: joined at RAY_ADDRESS, or started on this machine."""

import logging
import os

import ray

from hybridflow.controller.backends.ports import ADDRESS, check_ports
from hybridflow.errors import ResourceError

DEVICE = "hybridflow_device"
"""The custom resource of which a Ray started here has one unit per CPU device, so that any number can be had."""


def start_cluster(devices: int, nodes: int, device: str) -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine with virtual devices."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_ports()
    address = os.environ.get(ADDRESS)
    if nodes > 1 and not address:
        raise ResourceError(
            f"trainer.nodes={nodes}, and there is no Ray cluster to find them in.",
            remedy=f"Start one (ray start --head; ray start --address=... on the other nodes) and set {ADDRESS}.",
        )
    resources: dict[str, float] = {} if device == "cuda" else {DEVICE: devices}
    quiet = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", num_cpus=os.cpu_count(), resources=resources, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, OSError) as error:
        what = f"no cluster can be joined at {ADDRESS}={address}" if address else "it could not start here"
        raise ResourceError(
            f"Ray: {what}: {str(error).strip().splitlines()[0]}",
            remedy="Mend what it names, or do without Ray on one device: trainer.backend=local.",
        ) from error
