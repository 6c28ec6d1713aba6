"""One Ray for the whole session: starting it takes seconds, and each worker process another one or two."""

from collections.abc import Iterator

import pytest

from hybridflow.controller import Backend, BackendOptions, ResourcePool, make_backend
from tests.distributed.processes import Processes, started
from tests.toys import toy_dir

__all__ = ["toy_dir"]

DEVICES = 8


@pytest.fixture(scope="session")
def ray_backend() -> Iterator[Backend]:
    """A Ray of eight virtual devices, ended with the session."""
    backend = make_backend("ray", BackendOptions(devices=DEVICES, threads=1))
    yield backend
    backend.shutdown()


@pytest.fixture(scope="session")
def pair() -> ResourcePool:
    """A pool of two devices that tests share; whoever kills a worker uses a pool of its own."""
    return ResourcePool("pair", 2)


@pytest.fixture(scope="session")
def single() -> ResourcePool:
    """A pool of one device that tests share."""
    return ResourcePool("single", 1)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Commands in processes of their own."""
    with started(tmp_path_factory.mktemp("processes")) as server:
        yield server
