"""Processes on a Ray cluster that each get devices of their own, such as the runs of a sweep.

Not Ray's Job Submission: its server is not part of the package `ray`, and it fails jobs that wait for their devices for
15 minutes (docs/decisions/compose_api_not_hydra_main.md).
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.controller.backends.interface import GIVEN_POOLS, RAY_ADDRESS
from hybridflow.controller.backends.ray.cluster import (
    DEVICE,
    connect,
    disconnect,
    is_joined,
    join,
    joined_gpus,
    python_path,
)
from hybridflow.controller.backends.ray.placement import Request, too_few_devices
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import HybridflowError, ResourceError
from hybridflow.observability.formatting import counted

_OF_A_NODE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")
"""Environment variables that every node sets for itself, as it does those of Ray."""


class JobProcess(Protocol):
    """Starts and watches a process on the node of a job, in an actor. Its methods return immediately."""

    def start(self, environment: Mapping[str, str], devices_of_node: int) -> None:
        """Starts the process with these variables and those of the node, which has so many devices."""
        ...

    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        ...

    def stop(self) -> None:
        """Asks the process to end."""
        ...


class JobCluster:
    """The Ray cluster of a sweep's jobs.

        cluster = JobCluster()
        cluster.start(devices=8)
        job = Job([ResourcePool("main", 1)], drives=False)
        cluster.close()

    It is the cluster at RAY_ADDRESS, the one that `ray start` started on this machine, or one that is started here.
    """

    def __init__(self) -> None:
        had_ray = ray.is_initialized()
        self.is_joined = join()
        self._owns_ray = self.is_joined and not had_ray
        self.num_gpus = joined_gpus() if self.is_joined else None
        """GPUs of a joined cluster; None if the jobs run on this machine."""

    def start(self, devices: int) -> None:
        """Starts a cluster with so many devices of the type `cpu`, and this machine's GPUs, unless one was joined."""
        if not self.is_joined:
            self._owns_ray = connect(devices, 1, "cpu")

    def __str__(self) -> str:
        address = ray.get_runtime_context().gcs_address if is_joined() else "started here"
        nodes, devices = sum(node["Alive"] for node in ray.nodes()), ray.cluster_resources()
        counts = {
            "node": nodes,
            "CPU": int(devices.get(DEVICE, devices.get("CPU", 0))),
            "GPU": int(devices.get("GPU", 0)),
        }
        return f"{address}  {', '.join(counted(count, name) for name, count in counts.items() if count)}"

    def close(self) -> None:
        """Leaves the cluster, which ends all jobs, and stops it if it was started here."""
        if self._owns_ray and ray.is_initialized():
            disconnect()


class Job:
    """One process and its devices: requested -> `start` -> `ended` -> `release`.

    Pools are reserved one after another, in whole; while a job waits for its devices, request those of no other, so
    that no two jobs each hold what the other waits for.
    """

    def __init__(self, pools: Sequence[ResourcePool], *, drives: bool) -> None:
        """`drives`: the process starts Ray actors on the devices; otherwise it uses the only device itself."""
        assert drives or sum(pool.devices for pool in pools) == 1, f"{[*pools]}"
        self._pools, self._drives = list(pools), drives
        self._requests: list[Request] = []
        self._actor: ActorHandle | None = None
        self._answer: ray.ObjectRef | None = None
        self._is_started = False

    def is_placed(self, seconds: float) -> bool:
        """Whether all devices are reserved; waits for those of a pool at most so long."""
        while not self._requests or self._requests[-1].is_granted(seconds):
            count = len(self._requests)
            if count == len(self._pools):
                return True
            self._requests.append(Request(self._pools[count], self._pools[:count]))
        return False

    def shortage(self) -> ResourceError:
        """Why it is not placed."""
        last = self._requests[-1]
        return too_few_devices(last.pool, last.supply, waited_seconds=last.waited_seconds)

    def start(self, kind: type[JobProcess], *arguments: object) -> str:
        """Starts the process on the node of its first device; returns the name of the node."""
        first = self._requests[0]
        node = self._node()
        options = {
            "num_cpus": 0,
            "num_gpus": 1 if first.pool.device == "cuda" and not self._drives else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(first.group, placement_group_bundle_index=0),
            "runtime_env": {"env_vars": {"PYTHONPATH": python_path()}},
        }
        self._actor = cast(ActorHandle, ray.remote(kind).options(**options).remote(*arguments))
        devices = int(node["Resources"].get(first.resource, 1))
        self._answer = self._actor.start.remote(self._environment(), devices)
        return node["NodeManagerHostname"]

    def ended(self) -> int | None:
        """The exit status; None while the process runs or its node does not answer.

        Raises `HybridflowError` if it could not be started, or if its node was lost.
        """
        assert self._actor is not None and self._answer is not None, "it has not been started"
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            status = ray.get(self._answer)
        except RayTaskError as error:
            if isinstance(error.cause, HybridflowError):
                raise error.cause from error
            raise
        except RayError as error:
            raise ResourceError(
                f"The process that ran it on the cluster was lost: {str(error).strip().splitlines()[0]}",
                remedy="See `ray status` and the logs of the node, then repeat the command.",
            ) from error
        if self._is_started and status is not None:
            return status
        self._is_started, self._answer = True, self._actor.status.remote()
        return None

    def stop(self) -> None:
        """Asks the process to end; does not wait."""
        if self._actor is not None:
            self._actor.stop.remote()

    def release(self) -> None:
        """Ends the process if it still runs, and releases its devices."""
        if self._actor is not None:
            ray.kill(self._actor)
        for request in self._requests:
            request.withdraw()
        self._actor, self._requests = None, []

    def _environment(self) -> dict[str, str]:
        carried = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in _OF_A_NODE
        }
        own = {"PYTHONPATH": python_path(), RAY_ADDRESS: ray.get_runtime_context().gcs_address}
        if self._drives:
            own[GIVEN_POOLS] = json.dumps({request.pool.name: request.group.id.hex() for request in self._requests})
        elif self._pools[0].device == "cpu":
            own["CUDA_VISIBLE_DEVICES"] = ""  # trainer.device=auto must not choose a GPU that is not its own
        return carried | own

    def _node(self) -> Mapping:
        nodes = placement_group_table(self._requests[0].group)["bundles_to_node_id"]
        return next(node for node in ray.nodes() if node["NodeID"] == nodes[0])
