"""One case of scale.py: a PPO run of stand-ins at one number of ranks and rows; prints one JSON line.

The driver is real: the loop, the dataflow, worker groups, partition, metrics, the call log, `trace.json`,
`metrics.jsonl` and checkpoints. Seconds are those of the driver's processors (all threads of this process), so waiting
for the stand-ins, which are in another process, does not count.
"""

import argparse
import cProfile
import json
import pstats
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from scale_backend import CrowdBackend

from hybridflow.batch import Batch, Ragged
from hybridflow.config.loop import Trainer
from hybridflow.controller import BatchRef, ResourcePool, WorkerGroup
from hybridflow.controller.freed_memory import keep_freed_memory
from hybridflow.data.loader import BatchStream
from hybridflow.data.order import Epochs
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.roles import Policy, Trainable
from hybridflow.dataflows.run import Run
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.progress import Progress
from hybridflow.observability.trace import CallTrace
from hybridflow.observability.trackers.interface import TrackedRun
from hybridflow.observability.trackers.jsonl import JsonlTracker
from hybridflow.parallel import ParallelMesh
from hybridflow.process import frozen
from hybridflow.resharding.grouping import generation_mesh
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward_function import RewardFunctionWorker

if TYPE_CHECKING:
    from scale_ray import RayCrowd

SAMPLES_PER_PROMPT = 4
MINIBATCHES = 4
LONGEST_PROMPT = 16
TENSOR = 8
"""Tensor-parallel ranks of training with the layout `tensor`; 4 in generation. The layout `data` has one of each."""

WARM_UP = 1

ON_BATCH = ("draw", "generate", "score", "values", "advantages", "update")
"""Actions, each of which continues with the batch of the one before."""


@dataclass(frozen=True)
class Cost:
    """A cost of the driver: seconds of its processors, and bytes and messages that it sends and receives."""

    seconds: float
    bytes: float
    messages: float


def main() -> None:
    """Measures, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--layout", choices=("data", "tensor"), default="data")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="further steps, after which memory must not have grown")
    parser.add_argument("--messages", choices=("socket", "ray"), default="socket", help="how calls reach the stand-ins")
    parser.add_argument("--profile", nargs="+", help="print profiles of these calls (also `step`), instead of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as runs do
    backend = started_backend(options.messages)
    try:
        with tempfile.TemporaryDirectory() as directory, frozen():  # as commands run
            bench = Bench(backend, options.ranks, options.rows, options.layout, Path(directory))
            if options.profile:
                bench.show_profiles(set(options.profile))
                return
            costs = bench.costs(options.repeats)
            memory = bench.memory(options.steps)
    finally:
        backend.shutdown()
    named = {name: vars(cost) for name, cost in costs.items()}
    sys.stdout.write(json.dumps({"costs": named, "memory": memory}) + "\n")


def started_backend(messages: str) -> "CrowdBackend | RayCrowd":
    """The backend that sends the messages; Ray is imported only if it is chosen."""
    if messages == "socket":
        return CrowdBackend()
    from scale_ray import RayCrowd

    return RayCrowd()


class Bench:
    """A run whose roles are stand-ins."""

    def __init__(self, backend: "CrowdBackend | RayCrowd", ranks: int, rows: int, layout: str, directory: Path) -> None:
        self._backend = backend
        self._num_prompts = rows // SAMPLES_PER_PROMPT
        has_minibatches = self._num_prompts // MINIBATCHES >= ranks
        self._groups = started(backend, ranks, layout, rows // MINIBATCHES if has_minibatches else None)
        self._prompts = BatchStream(
            table(self._num_prompts), self._num_prompts, Epochs(self._num_prompts, 0, shuffle=True)
        )
        self._run = self._assembled(directory, ranks)
        self._loop = Loop(self._run)

    def costs(self, repeats: int) -> dict[str, Cost]:
        """The median cost of each call, of a step of PPO and of a checkpoint."""
        found: dict[str, list[Cost]] = {}
        for repeat in range(WARM_UP + repeats):
            for name, act in self._acts().items():
                cost = self._cost(act)
                if repeat >= WARM_UP:
                    found.setdefault(name, []).append(cost)
        return {name: _median(costs) for name, costs in found.items()}

    def memory(self, steps: int) -> dict[str, int]:
        """Bytes of this process and of the stand-ins' objects after 5 steps and after all."""
        if steps < 10:
            return {}
        measured = {}
        for step in range(1, steps + 1):
            self._step()
            if step in (5, steps):
                self._loop.save()
                self._loop.saved.finish()
                objects, size = self._backend.stored()
                measured |= {f"objects_{step}": objects, f"object_bytes_{step}": size}
                measured[f"driver_bytes_{step}"] = _resident_bytes()
        return measured

    def show_profiles(self, names: set[str]) -> None:
        """Prints where the time of some calls goes, after a warm-up: calls on a batch after those that make it."""
        acts = self._acts()
        needed = [name for name in acts if name in names or (name in ON_BATCH and not names.isdisjoint(ON_BATCH))]
        for repeat in range(2):
            for name in needed:
                if not repeat or name not in names:
                    acts[name]()
                    continue
                profile = cProfile.Profile(time.process_time)
                profile.runcall(acts[name])
                sys.stdout.write(f"{name}\n")
                pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)

    def _acts(self) -> dict[str, Callable[[], object]]:
        groups, batch, prompts = self._groups, dict[str, BatchRef](), dict[str, Batch]()
        actor, critic = groups["actor"], groups["critic"]

        def draw() -> None:
            prompts["it"] = self._prompts.next().repeat(SAMPLES_PER_PROMPT)

        def generate() -> None:
            batch["it"] = groups["rollout"].generate(prompts["it"]).result()

        def add(role: str, method: str) -> Callable[[], None]:
            def act() -> None:
                batch["it"] = getattr(groups[role], method)(batch["it"]).result()

            return act

        return {
            "empty": lambda: actor.publish_weights(version=0).result(),
            "draw": draw,
            "generate": generate,
            "score": add("reward", "score"),
            "values": add("critic", "values"),
            "advantages": add("critic", "advantages"),
            "update": lambda: critic.update(batch["it"]).result(),
            "step": self._step,
            **({"checkpoint": self._checkpoint} if isinstance(self._backend, CrowdBackend) else {}),
        }

    def _step(self) -> None:
        """A whole step, as `Loop.run` takes it."""
        with self._loop.stepping() as prompts:
            metrics = self._run.dataflow.step(prompts)
        self._loop.record(metrics)
        self._loop.log_step()

    def _checkpoint(self) -> None:
        self._loop.save()
        self._loop.saved.finish()

    def _cost(self, act: Callable[[], object]) -> Cost:
        backend = self._backend
        size, messages = backend.sent_bytes + backend.received_bytes, backend.num_messages
        seconds = time.process_time()
        act()
        seconds = time.process_time() - seconds
        return Cost(seconds, backend.sent_bytes + backend.received_bytes - size, backend.num_messages - messages)

    def _assembled(self, directory: Path, ranks: int) -> Run:
        groups = self._groups
        dataflow = PPO(groups, settings=PPO.Settings(), samples_per_prompt=SAMPLES_PER_PROMPT)
        dataflow.streams = {"prompts": self._prompts}
        trainer = Trainer(total_steps=10**6, run_dir=str(directory), eval_every=0, samples_every=0)
        return Run(
            trainer=trainer,
            dataflow=dataflow,
            streams={"prompts": self._prompts},
            evaluations=[],
            tracker=JsonlTracker(TrackedRun(directory, Progress(10**6, is_live=False))),
            timers=StageTimers(),
            checkpoints=CheckpointStore(directory, world=ranks),
            learners={name: cast(Trainable, groups[name]) for name in ("actor", "critic")},
            policies=[cast(Policy, groups["actor"])],
            decode=lambda ids: [""] * len(ids),
            trace=CallTrace(
                self._backend.drain_calls, {"main": ranks}, directory / "trace.json", keep=trainer.trace_steps
            ),
            num_devices=ranks,
            config={},
            calls=self._backend,
        )


def started(
    backend: "CrowdBackend | RayCrowd", ranks: int, layout: str, minibatch_rows: int | None
) -> dict[str, WorkerGroup]:
    """The roles of PPO, colocated on one pool."""
    pool = ResourcePool("main", ranks)
    if layout == "tensor":
        mesh = ParallelMesh({"data": ranks // TENSOR, "tensor": TENSOR})
        rollout = generation_mesh(mesh, copies=ranks // TENSOR, tensor=TENSOR // 2, pipeline=1)
    else:
        mesh = rollout = ParallelMesh({"data": ranks})
    classes = {
        "actor": ActorWorker,
        "critic": CriticWorker,
        "reference": ReferenceWorker,
        "reward": RewardFunctionWorker,
    }
    groups = {
        role: WorkerGroup(
            worker, pool, backend, role=role, mesh=mesh, generation_mesh=rollout, minibatch_rows=minibatch_rows
        )
        for role, worker in classes.items()
    }
    return {**groups, "rollout": groups["actor"].view("rollout")}


def table(rows: int) -> Batch:
    """Prompts of different lengths, with the columns that files of prompts have."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(LONGEST_PROMPT // 4, LONGEST_PROMPT + 1, (rows,), generator=draw)
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    texts = [f"What is {row} + {row}?" for row in range(rows)]
    objects = {"prompt": texts, "answer": [str(2 * row) for row in range(rows)], "data_source": ["sums"] * rows}
    return Batch.of(tokens={"prompt_ids": Ragged.from_lengths(ids, lengths)}, objects=objects)


def _median(costs: list[Cost]) -> Cost:
    columns = zip(*(vars(cost).values() for cost in costs), strict=True)
    return Cost(*(statistics.median(column) for column in columns))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
