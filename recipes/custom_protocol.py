"""A custom transfer protocol: rows sorted by length and dealt to the ranks like cards.

Question:  how do I distribute a batch over ranks in a way that no built-in protocol does?
Hardware:  1 CPU core.
Minutes:   less than 1.
Command:   python recipes/custom_protocol.py
Expect:    rank 0 counts 12 tokens, rank 1 counts 9.
"""

import argparse
from collections.abc import Sequence
from typing import cast

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import BatchRef, ResourcePool, Worker, WorkerGroup, make_backend, transfer
from hybridflow.controller.backends import BackendOptions
from hybridflow.controller.futures import Future
from hybridflow.parallel import ParallelMesh


class Dealt:
    """The longest row goes to rank 0, the next to rank 1 and so on; answers are concatenated by rank.

    The driver knows the length of each row, and `take` moves no data: each rank reads its own rows.
    """

    def distribute(self, batch: BatchRef, mesh: ParallelMesh) -> list[BatchRef]:
        """The batch of each rank."""
        longest_first = torch.argsort(batch.lengths, descending=True, stable=True)
        return [batch.take(longest_first[rank :: mesh.size]) for rank in range(mesh.size)]

    def collect(self, answers: Sequence[object], mesh: ParallelMesh) -> object:
        """One batch, if the answers are batches; otherwise the answers by rank."""
        batches = [answer for answer in answers if isinstance(answer, BatchRef)]
        return BatchRef.concat(batches) if batches else dict(enumerate(answers))


class Counter(Worker):
    """Counts tokens."""

    @transfer(Dealt(), requires=("uid", "prompt_ids"), provides=("tokens", "rank"))
    def count(self, batch: Batch) -> Batch:
        """Tokens per row, and the rank that counted them."""
        rank = torch.full((len(batch),), self.context.rank)
        return batch.with_columns(rows={"tokens": batch.tokens("prompt_ids").lengths, "rank": rank})

    @transfer(Dealt(), requires=("prompt_ids",))
    def total(self, batch: Batch) -> int:
        """All tokens of this rank's rows."""
        return len(batch.tokens("prompt_ids").values)


def prompts() -> Batch:
    """Six prompts of 1 to 6 tokens."""
    rows = [torch.arange(length) for length in (1, 6, 2, 5, 3, 4)]
    return Batch.of(rows={"uid": torch.arange(6)}, tokens={"prompt_ids": Ragged.from_rows(rows)})


def main() -> None:
    """Counts on two ranks, both in this process."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    group = WorkerGroup(Counter, ResourcePool("main", 2), make_backend("local", BackendOptions()), role="counter")
    counted = cast(BatchRef, group.count(prompts())).fetch()
    for name in ("rank", "uid", "tokens"):
        print(f"{name:>6}:", counted.row(name).tolist())
    print("tokens by rank:", cast(Future, group.total(prompts())).result())


if __name__ == "__main__":
    main()
