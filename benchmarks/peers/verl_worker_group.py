"""verl 0.9.1's RayWorkerGroup on CPU: latency of an empty call and seconds to move a batch; prints one JSON line.

Run by the peer's own python. The batch is a DataProto of `--rows` sequences with two int64 and four float32 token
columns, `--mb` MiB in all. `via_driver` is verl's default (the call blocks, the driver holds the whole batch);
`via_futures` is its `blocking=False` (a worker of the second group fetches all shards and cuts out its own).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

COLUMNS = {"input_ids": 8, "responses": 8, "old_log_probs": 4, "ref_log_prob": 4, "values": 4, "advantages": 4}
"""Token columns of the batch and the bytes of one element."""


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8], help="group sizes for the empty call")
    parser.add_argument("--mb", type=int, default=64, help="MiB of the batch that moves between groups of 4")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serialization", choices=("torch", "numpy"), default="torch", help="verl's default is torch")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_DEDUP_LOGS="0")
    if options.serialization == "numpy":
        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
    sys.stdout.write(json.dumps(measure(options)) + "\n")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Latencies in milliseconds for each group size, and seconds for each way of moving the batch."""
    import ray
    import verl

    ray.init(
        num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=2 << 30
    )
    worker_class = echo_worker_class()
    noop_ms, raw_ms, pipelined_ms = {}, {}, {}
    for size in options.workers:
        group = worker_group(worker_class, size)
        actors = group.workers
        noop_ms[str(size)] = 1e3 * median_seconds(group.noop, options.calls)
        raw_ms[str(size)] = 1e3 * median_seconds(lambda a=actors: ray.get([w.noop.remote() for w in a]), options.calls)
        pipelined_ms[str(size)] = 1e3 * pipelined_seconds(group, options.calls)
        for actor in actors:
            ray.kill(actor)
    batch = token_batch(options.rows, options.mb << 20)
    moves = move_seconds(worker_group(worker_class, 4), worker_group(worker_class, 4), batch, options.repeats)
    ray.shutdown()
    return {
        "system": f"verl {verl.__version__}",
        "serialization": options.serialization,
        "noop_ms": noop_ms,
        "noop_raw_ray_ms": raw_ms,
        "noop_pipelined_ms": pipelined_ms,
        f"move_{options.mb}mb_s": moves,
    }


def echo_worker_class():
    """A verl Worker, as a Ray actor class, that does nothing, returns its shard, keeps it, or gives it back."""
    import ray
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base import decorator as modes

    received = {
        "dispatch_fn": modes.dispatch_dp_compute_data_proto,
        "collect_fn": modes.collect_dp_compute,
    }
    produced = {
        "dispatch_fn": modes.dispatch_one_to_all,
        "collect_fn": modes.collect_dp_compute_data_proto,
    }
    split = modes.Dispatch.DP_COMPUTE_PROTO

    @ray.remote(num_cpus=0.1)
    class EchoWorker(Worker):
        @modes.register(dispatch_mode=modes.Dispatch.ONE_TO_ALL)
        def noop(self) -> None:
            return None

        @modes.register(dispatch_mode=split)
        def echo(self, batch: DataProto) -> DataProto:
            return batch

        @modes.register(dispatch_mode=split, blocking=False)
        def echo_later(self, batch: DataProto) -> DataProto:
            return batch

        @modes.register(dispatch_mode=received)
        def receive(self, batch: DataProto) -> int:
            self.kept = batch
            return len(batch)

        @modes.register(dispatch_mode=produced)
        def produce(self) -> DataProto:
            return self.kept

        @modes.register(dispatch_mode=produced, blocking=False)
        def produce_later(self) -> DataProto:
            return self.kept

    return EchoWorker


def worker_group(worker_class, size: int):
    """A RayWorkerGroup of `size` workers on one node without GPUs."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=worker_class), device_name="cpu")
    group.noop()
    return group


def token_batch(rows: int, num_bytes: int):
    """A DataProto of COLUMNS, all [rows, tokens], `num_bytes` in all."""
    import torch
    from verl import DataProto

    tokens = num_bytes // (rows * sum(COLUMNS.values()))
    tensors = {
        name: torch.zeros(rows, tokens, dtype=torch.int64) if size == 8 else torch.randn(rows, tokens)
        for name, size in COLUMNS.items()
    }
    return DataProto.from_dict(tensors=tensors)


def move_seconds(first, second, batch, repeats: int) -> dict[str, float]:
    """Median seconds of each route of the batch between the driver and two groups."""
    routes: dict[str, Callable[[], object]] = {
        "driver_to_group": lambda: first.receive(batch),
        "echo": lambda: first.echo(batch),
        "group_to_group_via_driver": lambda: second.receive(first.produce()),
        "group_to_group_via_futures": lambda: second.receive(first.produce_later()),
        "driver_to_group_to_group_via_driver": lambda: second.receive(first.echo(batch)),
        "driver_to_group_to_group_via_futures": lambda: second.receive(first.echo_later(batch)),
    }
    return {name: median_seconds(route, repeats) for name, route in routes.items()}


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` timed calls, after two that do not count."""
    seconds = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        call()
        if i >= 2:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def pipelined_seconds(group, calls: int) -> float:
    """Seconds per call if all are sent before the first answer is awaited."""
    import ray

    started = time.perf_counter()
    pending = [group.execute_all_async("noop") for _ in range(calls)]
    ray.get([answer for answers in pending for answer in answers])
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    main()
