"""The Ray cluster of a run, joined at RAY_ADDRESS or started on this machine: its ports and its GPUs."""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import psutil
import ray
from ray._private import ray_constants
from ray._private.services import find_bootstrap_address
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.backends.interface import RAY_ADDRESS
from hybridflow.controller.backends.ray.signals import own_sigterm, sigterm_kept
from hybridflow.controller.resource_pool import NodeGpus, visible_gpu_bytes
from hybridflow.errors import ResourceError

logger = logging.getLogger(__name__)

DEVICE = "hybridflow_device"
"""Custom resource of a Ray started here: one unit per CPU device, so that any number of devices is available."""

GPU_ENVIRONMENT = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # docs/decisions/visible_gpus.md
}
"""For processes that see all GPUs of their node."""

_ON_OWN_MACHINE = {
    "RAY_prestart_worker_first_driver": "0",  # one process per core, which none of our actors could use
    "RAY_worker_niceness": "0",  # by default 15: anything else on the machine would take the workers' time
    "RAY_task_events_report_interval_ms": "0",  # records of calls for the dashboard, which is not started
}
"""For the processes of a Ray started here; the user's own values take precedence."""

_STORE_PORT = "RAY_GCS_SERVER_PORT"
"""The environment variable with the port of a new cluster's GCS; by default Ray takes a free one."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""HTTP/2's connection preface with empty settings. Ray's gRPC servers answer with their own (RFC 9113, sec. 3.4)."""

_SETTINGS_FRAME = 4
_CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_TOKEN = " (a cluster with tokens: set RAY_AUTH_MODE=token, and put its token into ~/.ray/auth_token)"
LOGS = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
"""The directory of Ray's logs on a node."""
_VITAL = ("gcs_server", "raylet")


class _Connection:
    """How this process is connected to Ray."""

    has_started_ray = False
    has_joined_early = False
    is_starting_ray = False
    processes: tuple[psutil.Process, ...] = ()
    """Ray's head (GCS) and raylet, if they were started here."""


def check_cluster(nodes: int) -> None:
    """Raises `ResourceError` if a run on several nodes has no cluster, or if Ray's ports cannot be used.

    Ray itself waits for minutes if no Ray answers at RAY_ADDRESS, or if the port for a new cluster is in use.
    """
    if nodes > 1 and not ray.is_initialized() and not os.environ.get(RAY_ADDRESS):
        raise ResourceError(
            f"trainer.nodes={nodes}, but {RAY_ADDRESS} is not set, so there is no cluster to run on.",
            remedy=f"Start one (ray start --head; ray start --address=... on the other nodes) and set {RAY_ADDRESS}.",
        )
    host, colon, port = os.environ.get(RAY_ADDRESS, "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        _check_answers(host, int(port), nodes)
    wanted = os.environ.get(_STORE_PORT, "")
    if not os.environ.get(RAY_ADDRESS) and wanted.isdigit() and int(wanted):
        _check_free(int(wanted))


def connect(devices: int, nodes: int, device: str, *, cpu_devices: int = 0) -> bool:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine with virtual devices.

    `cpu_devices` are needed in addition to the devices.

    Returns whether the caller must disconnect: False if Ray was already initialized.
    """
    if ray.is_initialized():
        is_ours, _Connection.has_joined_early = _Connection.has_joined_early, False
        return is_ours
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The errors of calls that depend on a failed one, which is reported, would be printed too.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    check_cluster(nodes)
    if os.environ.get(RAY_ADDRESS):
        _initialized(os.environ[RAY_ADDRESS])
        return True
    logger.info("backend=ray: Ray starts on this machine, which takes seconds ...")
    for name, value in _ON_OWN_MACHINE.items():
        os.environ.setdefault(name, value)
    virtual = cpu_devices + (0 if device == "cuda" else devices)
    _initialized("local", num_cpus=os.cpu_count(), resources={DEVICE: virtual} if virtual else {})
    _Connection.has_started_ray = True
    children = psutil.Process().children()
    _Connection.processes = tuple(child for child in children if child.name() in _VITAL)
    return True


def join() -> bool:
    """Joins the cluster at RAY_ADDRESS or, without that, the one that `ray start` started on this machine.

    Returns whether there is one.
    """
    if not ray.is_initialized():
        if os.environ.get(RAY_ADDRESS):
            connect(0, 1, "cpu")
        elif _has_cluster_here():
            _initialized(None)
        else:
            return False
    return is_joined()


def _has_cluster_here() -> bool:
    """Whether a cluster that `ray start` started on this machine answers."""
    host, _, port = (find_bootstrap_address(None) or "").rpartition(":")
    with suppress(ResourceError):  # it has ended
        if port.isdigit():
            _check_answers(host, int(port), 1)
            return True
    return False


def disconnect() -> None:
    """Leaves the cluster, and stops it if it was started here."""
    with sigterm_kept():
        ray.shutdown()
    _Connection.has_started_ray, _Connection.processes = False, ()


def abandon() -> None:
    """Leaves a cluster whose head does not respond; Ray itself would wait for a response.

    Kills Ray's GCS and raylet if this process started them, so that Ray stops the rest. A joined cluster is left alone.
    """
    if is_joined():
        atexit.unregister(ray.shutdown)
        return
    for process in _Connection.processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    disconnect()


def has_ray_ended() -> bool:
    """Whether Ray was started here and one of its vital processes has ended; does not wait."""
    return any(_has_ended(process) for process in _Connection.processes)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_joined() -> bool:
    """Whether the cluster was started elsewhere: it may run other jobs, and may grow."""
    return not _Connection.has_started_ray


def joined_gpus() -> int | None:
    """The GPUs of the cluster at RAY_ADDRESS, which is joined if necessary; None if the run starts its own Ray."""
    if not ray.is_initialized():
        if not os.environ.get(RAY_ADDRESS):
            return None
        _Connection.has_joined_early = connect(0, 1, "cpu")
    return int(ray.cluster_resources().get("GPU", 0)) if is_joined() else None


def resource_of(device: str) -> str:
    """The resource whose units are the cluster's devices, given their kind (`cpu`, `cuda`)."""
    return "GPU" if device == "cuda" else DEVICE if DEVICE in ray.cluster_resources() else "CPU"


def joined_node_devices(device: str) -> list[int]:
    """The number of devices of each node that has any, in the cluster that this process has joined."""
    resource = resource_of(device)
    counts = (int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])
    return [count for count in counts if count]


def free_node_devices(device: str) -> dict[str, int]:
    """The devices that are not in use, by the id of each node of the cluster."""
    resource = resource_of(device)
    return {node: int(free.get(resource, 0)) for node, free in available_resources_per_node().items()}


def joined_node_gpus(read: Callable[[], list[int]] = visible_gpu_bytes) -> list[NodeGpus] | None:
    """The nodes of the joined cluster that have GPUs, one entry per size of GPU; None if no cluster is joined.

    Each node runs `read` in a separate process, which sees all GPUs of the node and reserves no resources. Ray itself
    knows only a name such as A100, which GPUs of several sizes share.
    """
    if not ray.is_initialized() or not is_joined():
        return None
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    remote = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(read)
    asked = [remote.options(**on_node(node["NodeID"], **GPU_ENVIRONMENT)).remote() for node in nodes]
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=_READ_SECONDS) if asked else ([], [])
    for answer in late:
        ray.cancel(answer)
    found: list[NodeGpus] = []
    for node, answer in zip(nodes, asked, strict=True):
        name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        count, sizes = int(node["Resources"]["GPU"]), _sizes(answer) if answer in ready else []
        # Ray may manage only some of the GPUs of the node, and any of them may be the smallest.
        same = len(sizes) == count
        found += NodeGpus.by_size(name, sizes) if same else [NodeGpus(name, count, min(sizes, default=0))]
    return found


def own_node_name() -> str:
    """The name that the node of this process was given (`ray start --node-name`); empty without one."""
    own = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == own]
    return "" if node["NodeName"] == node["NodeManagerAddress"] else node["NodeName"]


def on_node(node: str, **environment: str) -> dict[str, object]:
    """The options of a task or an actor on the node with an id, where it finds the same modules as this process."""
    variables = {"PYTHONPATH": python_path()} | environment
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"scheduling_strategy": strategy, "runtime_env": {"env_vars": variables}}


def python_path() -> str:
    """The module search path of this process, for processes on other nodes."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))


def _check_answers(host: str, port: int, nodes: int) -> None:
    alone = f", or unset {RAY_ADDRESS}: the run then starts its own Ray" if nodes == 1 else ""
    needed = "" if nodes == 1 else f" A run on trainer.nodes={nodes} needs a cluster that is already running."
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as connection:
            connection.sendall(_GREETING)
            header = connection.recv(9)
    except TimeoutError:
        header = b""
    except OSError as error:
        raise ResourceError(
            f"{RAY_ADDRESS}={host}:{port}, but no process is listening there: {error.strerror or error}.",
            remedy=f"Start a cluster there (ray start --head --port={port}), correct {RAY_ADDRESS}{alone}.{needed}",
        ) from error
    if len(header) < 9 or header[3] != _SETTINGS_FRAME:
        raise ResourceError(
            f"{RAY_ADDRESS}={host}:{port}, but the process that uses this port is not Ray.",
            remedy=f"Give the address that 'ray start --head' printed{alone}.{needed}",
        )


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ResourceError(
                f"{_STORE_PORT}={port}, but that port is in use: {error.strerror or error}.",
                remedy=f"Unset {_STORE_PORT}, so that Ray takes a free port, or end the process that holds it "
                f"(ss -ltnp 'sport = :{port}').",
            ) from error


def _sizes(answer: ray.ObjectRef) -> list[int]:
    try:
        return ray.get(answer)
    except RayError as error:
        logger.info("a node could not determine the memory of its GPUs: %s", str(error).strip().splitlines()[-1])
        return []


def _initialized(
    address: str | None, *, num_cpus: int | None = None, resources: dict[str, float] | None = None
) -> None:
    """Connects to the cluster at an address, or for None to that of `ray start`; `local` starts one."""
    try:
        with own_sigterm(), _on_loopback() if address == "local" else nullcontext(), _in_sessions_of_their_own():
            ray.init(
                address=address,
                num_cpus=num_cpus,
                resources=resources,
                include_dashboard=False if address == "local" else None,
                logging_level=logging.ERROR,
                log_to_driver=True,
            )
    except Exception as error:  # Ray raises a plain Exception if its processes end while they start
        what, first = "it could not start here", f"Start the run again. If that fails too, see Ray's logs ({LOGS})"
        if address != "local":
            where = f"at {RAY_ADDRESS}={address}" if address else "on this machine"
            what, first = f"no cluster can be joined {where}", "Fix what Ray reports"
        token = "" if address == "local" or os.environ.get("RAY_AUTH_MODE") else _TOKEN
        said = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ResourceError(
            f"Ray: {what}: {said}", remedy=f"{first}{token}, or use one device without Ray: trainer.backend=local."
        ) from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Makes Ray's processes listen only at 127.0.0.1, for a cluster of one machine.

    Ray reads this variable at import and in its processes; it exists for systems whose firewall prompts the user.
    """
    name, is_cluster = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster
        os.environ.pop(name) if before is None else os.environ.update({name: before})


@contextmanager
def _in_sessions_of_their_own() -> Iterator[None]:
    """Starts Ray's processes outside this process's group, which terminals and batch systems signal as a whole.

    This process can then finish its step and save while Ray still runs. If this process dies, the kernel kills the GCS
    and the raylet (Ray requests this); workers end within seconds. Ray's two agents would try for another minute to
    report this to the GCS; `observability/witness.py` and `launch/supervised.py` end them.
    """
    _Connection.is_starting_ray = True
    try:
        yield
    finally:
        _Connection.is_starting_ray = False


def _leave_session() -> None:
    if _Connection.is_starting_ray:
        os.setsid()


os.register_at_fork(after_in_child=_leave_session)
