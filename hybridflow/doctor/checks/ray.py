"""Ray: a cluster of one node started here, or the one at RAY_ADDRESS, and an actor on each node."""

import os
import time
from collections.abc import Iterator

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem
from hybridflow.observability.formatting import counted
from hybridflow.optional import version_of


def _cluster(place: Place) -> Iterator[Finding]:
    place.doing("importing ray")
    from hybridflow.controller.backends.interface import RAY_ADDRESS
    from hybridflow.controller.backends.ray.trial import own_versions, try_cluster

    address = os.environ.get(RAY_ADDRESS)
    place.doing(f"joining the cluster at {address}" if address else "starting Ray")
    began = time.monotonic()
    cluster = try_cluster()
    seconds, own = time.monotonic() - began, own_versions()
    for node in cluster.nodes:
        other = {name: found for name, found in node.versions.items() if found != own[name]}
        if other:
            differences = ", ".join(f"{name} {found or 'missing'} ({own[name]} here)" for name, found in other.items())
            yield problem(
                "ray",
                f"the node {node.name} has other versions: {differences}",
                "Install the same versions on every node.",
            )
    gpus, cpus = sum(node.gpus for node in cluster.nodes), sum(node.cpus for node in cluster.nodes)
    devices = f"{counted(gpus, 'GPU')}, " if gpus else ""
    has = f"{devices}{counted(cpus, 'CPU')} and {cluster.object_store_bytes / 2**30:.1f} GiB for objects"
    what = (
        f"joined {counted(len(cluster.nodes), 'node')} at {address}" if cluster.is_joined else "a cluster started here"
    )
    yield ok("ray", f"{version_of('ray')}: {what}, with {has}; actors answered after {seconds:.1f} s")


CHECKS = (Check("ray", "starting Ray", _cluster, seconds=90.0, needs=("imports", "loopback")),)
