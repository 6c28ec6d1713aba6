"""Small workers and batches for the tests of the controller."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import (
    BROADCAST,
    DATA_PARALLEL,
    GENERATION,
    MINIBATCHES,
    PER_RANK,
    Worker,
    WorkerContext,
    transfer,
)
from hybridflow.errors import RewardError
from hybridflow.observability.activity import ACTIVITY
from hybridflow.observability.metrics import Measure, mean, total


class Model(Worker):
    """Adds columns that say what was done where."""

    def __init__(self, context: WorkerContext, scale: float = 1.0) -> None:
        super().__init__(context)
        self.scale = scale
        self.seen: list[str] = []

    @transfer(DATA_PARALLEL, requires=("prompt_ids",), provides=("response_ids", "weight_version"))
    def generate(self, prompts: Batch) -> Batch:
        """Row i of a prompt that begins with p gets p tokens, all of them p; meta says the temperature."""
        self.seen = prompts.columns
        first = [int(row[0]) for row in prompts.tokens("prompt_ids").rows()]
        responses = Ragged.from_rows([[p] * p for p in first], dtype=torch.int64)
        version = torch.full((len(prompts),), 7)
        return prompts.with_columns(
            tokens={"response_ids": responses}, rows={"weight_version": version}, meta={"temperature": 0.5}
        )

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), optional=("bonus",), provides=("values",))
    def values(self, batch: Batch) -> Batch:
        self.seen = batch.columns
        responses = batch.tokens("response_ids")
        values = responses.like(responses.values * self.scale + self.context.rank * 0.0)
        return batch.with_columns(tokens={"values": values})

    @transfer(DATA_PARALLEL, requires=("answer", "response_ids"), provides=("scores",))
    def score(self, batch: Batch) -> Batch:
        """`scores`, and a column that is not declared."""
        scores = torch.tensor([float(answer) for answer in batch.object("answer")])
        where = torch.full((len(batch),), self.context.rank)
        return batch.with_columns(rows={"scores": scores, "scored_by": where})

    @transfer(DATA_PARALLEL, requires=("response_ids",))
    def update(self, batch: Batch) -> dict[str, Measure]:
        tokens = batch.tokens("response_ids").values
        return {"loss": mean(float(tokens.float().mean()), len(tokens)), "rows": total(len(batch))}

    @transfer(MINIBATCHES, requires=("uid",))
    def minibatches(self, batch: Batch) -> list[list[int]]:
        """The uids of each minibatch that this rank has a part of."""
        rows = batch.meta.get("minibatch_rows", (len(batch),))
        assert isinstance(rows, tuple)
        return [part.tolist() for part in batch.row("uid").split(list(rows))]

    @transfer(MINIBATCHES, requires=("uid", "answer"), other_requires=("uid",))
    def both(self, batch: Batch, other: Batch | None = None) -> list[tuple[list[int], list[int]]]:
        """The uids of each minibatch that this rank has a part of, and of what stands beside it."""
        if other is None:
            return [(batch.row("uid").tolist(), [])]
        assert other.columns == ["uid"]
        rows, beside = batch.meta.get("minibatch_rows", (len(batch),)), other.meta["minibatch_rows"]
        assert isinstance(rows, tuple) and isinstance(beside, tuple)
        left, right = batch.row("uid").split(list(rows)), other.row("uid").split(list(beside))
        return [(a.tolist(), b.tolist()) for a, b in zip(left, right, strict=True)]

    @transfer(DATA_PARALLEL)
    def columns_seen(self, batch: Batch) -> list[str]:
        return batch.columns

    @transfer(BROADCAST)
    def last_seen(self) -> list[str]:
        return self.seen

    @transfer(BROADCAST, provides=("echo",))
    def everyone(self, batch: Batch) -> Batch:
        return batch.with_columns(rows={"echo": torch.full((len(batch),), self.context.rank)})

    @transfer(DATA_PARALLEL, provides=("scores",))
    def lose_a_row(self, batch: Batch) -> Batch:
        return batch.slice(0, len(batch) - 1).with_columns(rows={"scores": torch.zeros(len(batch) - 1)})

    @transfer(DATA_PARALLEL, provides=("scores",))
    def forget_a_column(self, batch: Batch) -> Batch:
        return batch


class Talker(Worker):
    """Answers with plain values."""

    @transfer(BROADCAST)
    def rank(self) -> int:
        return self.context.rank

    @transfer(BROADCAST)
    def nothing(self) -> None:
        return None

    @transfer(BROADCAST)
    def remember(self, what: str) -> None:
        self.remembered = what

    @transfer(BROADCAST)
    def recall(self) -> str:
        return self.remembered

    @transfer(PER_RANK)
    def add(self, left: int, *, right: int) -> int:
        return left + right

    @transfer(PER_RANK)
    def rows(self, batch: Batch) -> int:
        return len(batch)

    @transfer(MINIBATCHES, requires=("uid",))
    def slow_update(self, batch: Batch) -> int:
        time.sleep(3.0)
        return len(batch)

    @transfer(MINIBATCHES, requires=("uid",))
    def failing_update(self, batch: Batch) -> int:
        time.sleep(1.0)
        raise ZeroDivisionError("no such number")

    @transfer(DATA_PARALLEL, requires=("uid",), provides=("scores",))
    def slow_scores(self, batch: Batch) -> Batch:
        time.sleep(120.0)
        return batch.with_columns(rows={"scores": torch.zeros(len(batch))})

    @transfer(GENERATION, requires=("uid",))
    def uids(self, batch: Batch) -> list[int]:
        return batch.row("uid").tolist()

    @transfer(BROADCAST)
    def sleep(self, seconds: float) -> tuple[float, float]:
        start = time.time()
        time.sleep(seconds)
        return start, time.time()

    @transfer(BROADCAST)
    def compute(self, seconds: float) -> None:
        """Python that never waits: other threads run only because it is interrupted."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(100_000))

    @transfer(BROADCAST)
    def fail(self, on_rank: int) -> None:
        if self.context.rank == on_rank:
            raise ZeroDivisionError("no such number")

    @transfer(BROADCAST)
    def fail_with_remedy(self) -> None:
        raise RewardError("The reward of row 3 is NaN.", remedy="Look at the function 'exact_match'.")

    @transfer(BROADCAST)
    def pid(self) -> int:
        return os.getpid()

    @transfer(BROADCAST)
    def total(self, value: float) -> float:
        """The sum of `value` times rank + 1 over all ranks."""
        total = torch.tensor(value * (self.context.rank + 1))
        dist.all_reduce(total, group=self.context.process_group())
        return float(total)

    @transfer(BROADCAST)
    def totals_for(self, seconds: float) -> None:
        """Sums over all ranks, one after the other."""
        until = time.monotonic() + seconds
        while self.total(time.monotonic() - until) < 0:
            pass

    @transfer(BROADCAST)
    def total_after(self, seconds: float) -> float:
        """Rank 0 waits for the others in a sum while they are still asleep."""
        time.sleep(seconds * self.context.rank)
        return self.total(1.0)

    @transfer(BROADCAST)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def hidden(self) -> None:
        """Not open to the driver."""


class Stuck(Worker):
    """Methods that make no progress, on rank 1 only if there are several; watched like those of the package."""

    @transfer(BROADCAST)
    def pid(self) -> int:
        return os.getpid()

    @transfer(BROADCAST)
    def total_behind_sleep(self, seconds: float) -> float:
        """Rank 0 waits in a sum for rank 1, which sleeps."""
        if self.context.rank == self.context.world_size - 1:
            time.sleep(seconds)
        total = torch.tensor(1.0)
        dist.all_reduce(total, group=self.context.process_group())
        return float(total)

    @transfer(BROADCAST)
    def wait(self, seconds: float) -> None:
        """Declares that it waits."""
        with ACTIVITY.waiting(2 * seconds):
            time.sleep(seconds)

    compute = Talker.compute

    @transfer(BROADCAST)
    def compute_in_child(self, seconds: float) -> None:
        """A child process uses the processor."""
        program = (
            f"import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: sum(range(10**5))"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

    for _method in (total_behind_sleep, wait, compute, compute_in_child):
        _method.__module__ = "hybridflow.tests"


class Broken(Worker):
    """Cannot be made."""

    def __init__(self, context: WorkerContext, path: str) -> None:
        raise FileNotFoundError(f"no model at {path}")


def prompts(rows: int = 6, siblings: int = 2) -> Batch:
    """`rows` prompts of different lengths, `siblings` adjacent rows sharing a uid; prompt i begins with i + 1."""
    batch = Batch.of(
        rows={"uid": torch.arange(100, 100 + rows)},
        tokens={"prompt_ids": Ragged.from_rows([[i + 1] * (1 + i % 3) for i in range(rows)], dtype=torch.int64)},
        objects={"answer": [str(i) for i in range(rows)]},
    )
    return batch.repeat(siblings)
