"""The single controller: one driver, many SPMD groups. Read `worker_group.py`, `protocols.py`, then `batch_ref.py`.

The driver moves handles, never tokens: results stay where they were produced, and consumers fetch their parts.
"""

from hybridflow.controller.backends import Backend, BackendOptions, make_backend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import Future, wait
from hybridflow.controller.protocols import (
    BROADCAST,
    DATA_PARALLEL,
    GENERATION,
    MINIBATCHES,
    PER_RANK,
    STAGES,
    CustomProtocol,
    TransferProtocol,
)
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.controller.worker_group import WorkerGroup

__all__ = [
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "ResourcePool",
    "transfer",
    "TransferProtocol",
    "CustomProtocol",
    "BROADCAST",
    "DATA_PARALLEL",
    "MINIBATCHES",
    "GENERATION",
    "STAGES",
    "PER_RANK",
    "BatchRef",
    "Future",
    "wait",
    "Backend",
    "BackendOptions",
    "make_backend",
]
