"""The Ray cluster of a run: joined at RAY_ADDRESS, or started on this machine."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import psutil
import ray
from ray._private import ray_constants

from hybridflow.controller.backends.ports import ADDRESS, check_ports
from hybridflow.errors import ResourceError

DEVICE = "hybridflow_device"
"""Custom resource with one unit per CPU device of a Ray started here, so that any number of devices is available."""


_TOKEN = " (a cluster with tokens: set RAY_AUTH_MODE=token, and put its token into ~/.ray/auth_token)"
_VITAL = ("gcs_server", "raylet")


class _Connection:
    """How this process was connected."""

    has_started_ray = False
    has_joined_early = False
    is_starting_ray = False
    processes: tuple[psutil.Process, ...] = ()
    """Ray's head (GCS) and raylet, if they were started here."""


def check_cluster(nodes: int) -> None:
    """Raises `ResourceError` if a run on several nodes has no cluster, or if the ports of Ray cannot be used."""
    if nodes > 1 and not ray.is_initialized() and not os.environ.get(ADDRESS):
        raise ResourceError(
            f"trainer.nodes={nodes}, and {ADDRESS} is not set, so there is no cluster to run on.",
            remedy=f"Start one (ray start --head; ray start --address=... on the other nodes) and set {ADDRESS}.",
        )
    check_ports(nodes)


def connect(devices: int, nodes: int, device: str) -> bool:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine with virtual devices.

    Returns whether the caller must end the connection; not if it existed before.
    """
    if ray.is_initialized():
        is_ours, _Connection.has_joined_early = _Connection.has_joined_early, False
        return is_ours
    _set_environment()
    check_cluster(nodes)
    if os.environ.get(ADDRESS):
        _initialized(os.environ[ADDRESS])
        return True
    _initialized("local", num_cpus=os.cpu_count(), resources={} if device == "cuda" else {DEVICE: devices})
    _Connection.has_started_ray = True
    children = psutil.Process().children()
    _Connection.processes = tuple(child for child in children if child.name() in _VITAL)
    return True


def disconnect() -> None:
    """Leaves the cluster, and stops it if it was started here."""
    ray.shutdown()
    _Connection.has_started_ray, _Connection.processes = False, ()


def abandon() -> None:
    """Leaves a cluster whose head does not respond; Ray itself would wait for a response.

    Processes that were started here are killed, so that Ray notices and stops the rest. Another cluster is left alone.
    """
    if is_joined():
        atexit.unregister(ray.shutdown)
        return
    for process in _Connection.processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    disconnect()


def has_ray_ended() -> bool:
    """Whether Ray was started here and one of its vital processes has ended, which takes no waiting to find out."""
    return any(_has_ended(process) for process in _Connection.processes)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_joined() -> bool:
    """Whether the cluster was started elsewhere: it may have other jobs, and may grow."""
    return not _Connection.has_started_ray


def joined_gpus() -> int | None:
    """GPUs of the cluster at RAY_ADDRESS, which is joined if necessary; None if Ray will start on this machine."""
    if not ray.is_initialized():
        if not os.environ.get(ADDRESS):
            return None
        _Connection.has_joined_early = connect(0, 1, "cpu")
    return int(ray.cluster_resources().get("GPU", 0)) if is_joined() else None


def _set_environment() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _initialized(address: str, *, num_cpus: int | None = None, resources: dict[str, float] | None = None) -> None:
    """Connects to the cluster at an address, or with `local` starts one that has these resources."""
    try:
        with _own_sigterm(), _on_loopback() if address == "local" else nullcontext(), _in_sessions_of_their_own():
            ray.init(
                address=address,
                num_cpus=num_cpus,
                resources=resources,
                include_dashboard=False if address == "local" else None,
                logging_level=logging.ERROR,
                log_to_driver=True,
            )
    except (ConnectionError, RuntimeError, OSError) as error:
        what = "it could not start here" if address == "local" else f"no cluster can be joined at {ADDRESS}={address}"
        token = "" if address == "local" or os.environ.get("RAY_AUTH_MODE") else _TOKEN
        raise ResourceError(
            f"Ray: {what}: {str(error).strip().splitlines()[0]}",
            remedy=f"Fix what Ray names{token}, or use one device without Ray: trainer.backend=local.",
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this process's handler of SIGTERM: Ray's own ends the driver immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Makes Ray's processes listen at 127.0.0.1 only, for a cluster of this machine alone.

    Ray provides this for systems whose firewall prompts: a switch that it reads at import and in its processes.
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
    """Starts Ray's processes outside this process's group, which a terminal, `timeout` or a batch system signals whole.

    This process then finishes its step and saves while Ray still runs. If this process dies, the kernel kills Ray's
    head and raylet, as Ray asks it to; workers end within seconds, and Ray's two agents after about a minute.
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
