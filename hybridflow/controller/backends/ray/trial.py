"""Tries Ray: an actor on every node of the cluster at RAY_ADDRESS, or of one that is started here for it."""

import platform
import socket
from dataclasses import dataclass
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from hybridflow.controller.backends.ray.cluster import LOGS, connect, disconnect, is_joined, on_node
from hybridflow.errors import ResourceError
from hybridflow.optional import version_of

_PACKAGES = ("torch", "ray", "hybridflow")
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class TriedNode:
    """A node of the cluster, as an actor on it sees it."""

    name: str
    cpus: int
    gpus: int
    versions: dict[str, str]


@dataclass(frozen=True)
class TriedCluster:
    """The cluster whose nodes have answered."""

    is_joined: bool
    nodes: tuple[TriedNode, ...]
    object_store_bytes: int


class _Probe:
    """An actor that says which versions its node has."""

    def versions(self) -> tuple[str, dict[str, str]]:
        """The node's name, and the versions of Python and of packages."""
        return socket.gethostname(), own_versions()


def own_versions() -> dict[str, str]:
    """The versions of Python and of packages in this process."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}


def try_cluster() -> TriedCluster:
    """Starts or joins a cluster, calls an actor on each node, and leaves it.

    Raises `ResourceError` if there is no cluster at RAY_ADDRESS, or if a node does not answer.
    """
    connect(1, 1, "cpu")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        actors = [_actor_on(node["NodeID"]) for node in nodes]
        asked: list[ray.ObjectRef] = [actor.versions.remote() for actor in actors]
        _, late = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_SECONDS)
        if late:
            names = ", ".join(
                node["NodeManagerHostname"] for node, ref in zip(nodes, asked, strict=True) if ref in late
            )
            raise ResourceError(
                f"An actor did not start within {_ANSWER_SECONDS:.0f} s on {names}.",
                remedy=f"See Ray's logs on that node ({LOGS}), and 'ray status'.",
            )
        found = [
            TriedNode(name, int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)), versions)
            for node, (name, versions) in zip(nodes, ray.get(asked), strict=True)
        ]
        stored = int(sum(node["Resources"].get("object_store_memory", 0) for node in nodes))
        return TriedCluster(is_joined(), tuple(found), stored)
    except RayError as error:
        raise ResourceError(
            f"An actor could not run: {str(error).strip().splitlines()[-1]}",
            remedy=f"See Ray's logs on its node ({LOGS}).",
        ) from error
    finally:
        disconnect()


def _actor_on(node: str) -> ActorHandle:
    remote = ray.remote(num_cpus=0, max_restarts=0)(_Probe)
    return cast(ActorHandle, remote.options(**on_node(node)).remote())
