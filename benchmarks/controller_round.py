"""One round of controller.py on our side: empty calls and moving batches, ours and raw Ray on the same actors, in turn.

Prints one JSON line. Runs in a process of its own, so that its Ray and a peer's are never up at the same time.
"""

import argparse
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from unittest import mock

import ray
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import BROADCAST, DATA_PARALLEL, BatchRef, ResourcePool, Worker, WorkerGroup, transfer, wait
from hybridflow.controller.backends import BackendOptions
from hybridflow.controller.backends.ray import RayBackend

COLUMNS = {"input_ids": 8, "responses": 8, "old_log_probs": 4, "ref_log_prob": 4, "values": 4, "advantages": 4}
"""Token columns of the batch and the bytes of one element, as in peers/verl_worker_group.py."""

GROUP = 4
SIBLINGS = 4


class Mover(Worker):
    """Does nothing, returns its part, keeps it, or gives it back."""

    kept: Batch

    @transfer(BROADCAST)
    def noop(self) -> None:
        """Nothing."""

    @transfer(DATA_PARALLEL, provides=tuple(COLUMNS))
    def echo(self, batch: Batch) -> Batch:
        """Every column it was given, written again."""
        return batch

    @transfer(DATA_PARALLEL)
    def receive(self, batch: Batch) -> int:
        """Keeps its part, which is mapped memory that need not have been read."""
        self.kept = batch
        return len(batch)

    @transfer(DATA_PARALLEL)
    def read(self, batch: Batch) -> float:
        """Reads every token of every column once."""
        return float(sum(column.values.sum(dtype=torch.float64) for column in batch.token_columns.values()))

    @transfer(DATA_PARALLEL, provides=("uid", *COLUMNS))
    def produce(self) -> Batch:
        """The batch that it kept."""
        return self.kept


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    backend = RayBackend(BackendOptions(devices=2 * GROUP, threads=1))
    try:
        sys.stdout.write(json.dumps(measured(backend, options)) + "\n")
    finally:
        backend.shutdown()


def measured(backend: RayBackend, options: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of an empty call to 4 and 8 workers, seconds of each route of a batch, and bytes in the driver."""
    first, second = (WorkerGroup(Mover, ResourcePool(name, GROUP), backend, role=name) for name in ("first", "second"))
    noop, raw, pipelined = {}, {}, {}
    noop["4"], raw["4"], pipelined["4"] = empty_call(first, options.calls)
    batch = token_batch(options.rows, options.mb << 20)
    routes = ours(first, second, batch) | raw_ray(first, second, batch)
    moves = medians(routes, options.repeats)
    driver_bytes = {
        f"{mb}mb": bytes_in_driver(backend, first, second, token_batch(options.rows, mb << 20))
        for mb in (1, options.mb)
    }
    first.kill()
    second.kill()
    eight = WorkerGroup(Mover, ResourcePool("eight", 2 * GROUP), backend, role="eight")
    noop["8"], raw["8"], pipelined["8"] = empty_call(eight, options.calls)
    return {
        "system": "hybridflow",
        "noop_ms": noop,
        "noop_raw_ray_ms": raw,
        "noop_pipelined_ms": pipelined,
        f"move_{options.mb}mb_s": moves,
        "driver_bytes": driver_bytes,
    }


def empty_call(group: WorkerGroup, calls: int) -> tuple[float, float, float]:
    """Median milliseconds of ours and of raw Ray on the same actors, alternating; and of ours, pipelined."""
    group.noop().result()
    actors = actors_of(group)
    times = medians(
        {
            "ours": lambda: group.noop().result(),
            "raw": lambda: ray.get([actor.__ray_ready__.remote() for actor in actors]),
        },
        calls,
    )
    started = time.perf_counter()
    wait(*(group.noop() for _ in range(calls)))
    return 1e3 * times["ours"], 1e3 * times["raw"], 1e3 * (time.perf_counter() - started) / calls


def ours(first: WorkerGroup, second: WorkerGroup, batch: Batch) -> dict[str, Callable[[], object]]:
    """The routes of a batch by worker groups. A batch of the driver is stored again at every call.

    `group_to_group_picked` hands on three quarters of the prompts in another order: rows from every shard to each rank.
    """
    prompts = torch.randperm(len(batch) // SIBLINGS, generator=torch.Generator().manual_seed(0))
    picked = (prompts[: len(prompts) * 3 // 4, None] * SIBLINGS + torch.arange(SIBLINGS)).flatten()
    return {
        "driver_to_group": lambda: first.receive(batch).result(),
        "echo": lambda: first.echo(batch).result(),
        "echo_and_fetch": lambda: cast(BatchRef, first.echo(batch)).fetch(),
        "group_to_group": lambda: second.receive(first.produce()).result(),
        "group_to_group_read": lambda: second.read(first.produce()).result(),
        "driver_to_group_to_group": lambda: second.receive(first.echo(batch)).result(),
        "driver_to_group_to_group_read": lambda: second.read(first.echo(batch)).result(),
        "group_to_group_picked": lambda: second.receive(cast(BatchRef, first.produce()).take(picked)).result(),
    }


def raw_ray(first: WorkerGroup, second: WorkerGroup, batch: Batch) -> dict[str, Callable[[], object]]:
    """The same with Ray alone on the same actors: dicts of tensors in equal parts, references from group to group."""
    one, two = actors_of(first), actors_of(second)
    columns = {name: column.values for name, column in batch.token_columns.items()}
    parts = [
        dict(zip(columns, chunk, strict=True))
        for chunk in zip(*(values.chunk(GROUP) for values in columns.values()), strict=True)
    ]

    def sent() -> list[ray.ObjectRef]:
        return [actor.__ray_call__.remote(_echo, part) for actor, part in zip(one, parts, strict=True)]

    def received(references: list[ray.ObjectRef]) -> object:
        return ray.get([actor.__ray_call__.remote(_size, part) for actor, part in zip(two, references, strict=True)])

    return {
        "raw_driver_to_group": lambda: ray.get(
            [actor.__ray_call__.remote(_size, part) for actor, part in zip(one, parts, strict=True)]
        ),
        "raw_echo_and_fetch": lambda: ray.get(sent()),
        "raw_driver_to_group_to_group": lambda: received(sent()),
    }


def actors_of(group: WorkerGroup) -> list:
    """The Ray actors that a group's workers live in."""
    return [vars(handle.host)["actor"] for handle in group.handles]


def token_batch(rows: int, num_bytes: int) -> Batch:
    """COLUMNS with as many tokens in each row, `num_bytes` in all; four siblings a prompt."""
    tokens = num_bytes // (rows * sum(COLUMNS.values()))
    lengths = torch.full((rows,), tokens)
    columns = {}
    for name, size in COLUMNS.items():
        values = torch.zeros(rows * tokens, dtype=torch.int64) if size == 8 else torch.randn(rows * tokens)
        columns[name] = Ragged.from_lengths(values, lengths)
    return Batch.of(rows={"uid": torch.arange(rows) // SIBLINGS}, tokens=columns)


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, all in turn, after two rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bytes_in_driver(backend: RayBackend, first: WorkerGroup, second: WorkerGroup, batch: Batch) -> int:
    """Bytes the driver sends and reads to move a batch that a group holds to another group."""
    first.receive(batch).result()
    with counted(backend) as sizes:
        second.receive(first.produce()).result()
    return sum(sizes)


@contextmanager
def counted(backend: RayBackend) -> Iterator[list[int]]:
    """The sizes of everything that is sent with calls, stored or read by this process meanwhile."""
    sizes: list[int] = []
    call, put, get = backend.call, ray.put, ray.get

    def counting_call(handle, method, arguments, *rest):
        sizes.append(len(pickle.dumps((method, arguments.args, arguments.kwargs))))
        return call(handle, method, arguments, *rest)

    def counting_put(value):
        sizes.append(len(pickle.dumps(value)))
        return put(value)

    def counting_get(references, **options):
        values = get(references, **options)
        sizes.append(len(pickle.dumps(values)))
        return values

    with (
        mock.patch.object(backend, "call", counting_call),
        mock.patch.object(ray, "put", counting_put),
        mock.patch.object(ray, "get", counting_get),
    ):
        yield sizes


def _echo(actor: object, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return part


def _size(actor: object, part: dict[str, torch.Tensor]) -> int:
    return len(part)


if __name__ == "__main__":
    main()
