"""Waits until the nodes of a run have joined its Ray cluster and reach one another."""

import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence

import ray
from ray.exceptions import RayError

from hybridflow.controller.backends.ray.cluster import connect, disconnect, on_node
from hybridflow.errors import ResourceError
from hybridflow.observability.formatting import counted

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_MOST_NAMED = 8
_TIME = "set trainer.start_timeout_seconds if the nodes need more time"


def await_nodes(names: Sequence[str], count: int, *, gpus: int, seconds: float) -> None:
    """Returns once the nodes have joined the cluster at RAY_ADDRESS, have their GPUs, and reach one another.

    `names` are those that were given to `ray start --node-name`; without them, any `count` nodes are awaited. Raises
    `ResourceError` that names the nodes that are missing after `seconds`, lack GPUs or are not reached.
    """
    deadline = time.monotonic() + seconds
    is_ours = _join(deadline, count)
    try:
        nodes = _joined(names, count, deadline, seconds)
        short = [f"{name} has {int(node['Resources'].get('GPU', 0))}" for name, node in nodes.items()
                 if node["Resources"].get("GPU", 0) < gpus]  # fmt: skip
        if short:
            raise ResourceError(
                f"The run needs {counted(gpus, 'GPU')} on each node, but {_listed(short)}.",
                remedy="Set trainer.devices to the number of GPUs per node, or reserve more of them.",
            )
        _check_reached(nodes, deadline)
    finally:
        if is_ours:
            disconnect()


def _join(deadline: float, count: int) -> bool:
    """Joins the cluster as soon as its head answers; returns whether it must be left afterwards."""
    while True:
        try:
            return connect(0, count, "cpu")
        except ResourceError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)


def _joined(names: Sequence[str], count: int, deadline: float, seconds: float) -> dict[str, Mapping]:
    """The nodes by their names, once all have joined."""
    next_word = time.monotonic() + _SAY_SECONDS
    while True:
        alive = {node["NodeName"]: node for node in ray.nodes() if node["Alive"]}
        missing = [name for name in names if name not in alive]
        joined = len(names) - len(missing) if names else len(alive)
        if joined >= count:
            logger.info("nodes: %d of %d have joined the Ray cluster", joined, count)
            return {name: alive[name] for name in names} if names else alive
        if time.monotonic() > deadline:
            raise ResourceError(
                f"{joined} of {counted(count, 'node')} joined the Ray cluster within {seconds:g} s."
                f"{f' Missing: {_listed(missing)}.' if names else ''}",
                remedy=f"Read in the log what 'ray start' says on the missing nodes, and {_TIME}.",
            )
        if time.monotonic() > next_word:
            next_word += _SAY_SECONDS
            logger.info("nodes: %d of %d have joined; missing: %s", joined, count, _listed(missing) or "unknown")
        time.sleep(_LOOK_SECONDS)


def _check_reached(nodes: Mapping[str, Mapping], deadline: float) -> None:
    """Raises `ResourceError` if a node cannot connect to another one."""
    places = {name: (node["NodeManagerAddress"], int(node["NodeManagerPort"])) for name, node in nodes.items()}
    remote = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(unreached)
    asked = {}
    for name, node in nodes.items():
        others = {other: place for other, place in places.items() if other != name}
        asked[remote.options(**on_node(node["NodeID"])).remote(others)] = name
    ready, late = ray.wait([*asked], num_returns=len(asked), timeout=max(60.0, deadline - time.monotonic()))
    problems = [f"{asked[answer]} has not answered" for answer in late]
    for answer in ready:
        try:
            problems += [f"{asked[answer]} does not reach {problem}" for problem in ray.get(answer)]
        except RayError as error:
            problems.append(f"{asked[answer]}: {str(error).strip().splitlines()[-1]}")
    if problems:
        raise ResourceError(
            f"The nodes do not reach one another: {_listed(sorted(problems), '; ')}.",
            remedy="Let the nodes of the job connect to one another on all ports, and check the addresses that Ray uses"
            " (ray start --node-ip-address) on machines with several networks.",
        )


def unreached(others: Mapping[str, tuple[str, int]]) -> list[str]:
    """The other nodes whose Ray does not accept a connection from this node, with the reasons."""
    problems = []
    for name, place in others.items():
        try:
            socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            problems.append(f"{name} at {place[0]}:{place[1]} ({error.strerror or error})")
    return problems


def _listed(names: Collection[str], sign: str = ", ") -> str:
    shown = sign.join(list(names)[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown
