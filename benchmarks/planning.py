"""Seconds and bytes to plan a transition of large models on many ranks: what each rank of a run hears and works out.

    python benchmarks/planning.py [--repeats 3] [--only TEXT] [--record]

One process, no tensors: the layouts are made from the models' sizes. Every rank writes messages of its own; one rank
then does what each rank of a run does. `MiB received` is all that it hears. `exchange s` is declaring what it holds,
writing its messages and reading everybody's; `plan s` is making the plan; `own part s` lists what it
receives, sends and keeps, of which `pieces` are received. Seconds are of the process, the least of several.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from benchmarks.layouts import Layout, fsdp, megatron, rollout
from benchmarks.record import HERE, write_record
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.models.catalogue import find_model
from hybridflow.models.geometry import ModelGeometry
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import uncovered, volume
from hybridflow.resharding import Holding
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from hybridflow.resharding.holdings import Declared
from hybridflow.resharding.members import Member, members_from, neighbors_of, transferred, wire_dtypes
from hybridflow.resharding.plan import ReshardPlan, make_plan
from hybridflow.resharding.transport import DIGEST_BYTES

LLAMA_70B = find_model("Llama-3.1-70B").geometry
QWEN3_30B_A3B = find_model("Qwen3-30B-A3B").geometry
MOE_671B = replace(QWEN3_30B_A3B, hidden=7168, layers=60, heads=128, kv_heads=8, intermediate=2048, experts=256)
"""As many weights, and about as many bytes, as the largest open mixtures of experts."""

DEVICES_PER_NODE = 8
MIB = 1 << 20

ResultT = TypeVar("ResultT")


class Case(NamedTuple):
    """A model, trained on one mesh and generating on another."""

    name: str
    geometry: ModelGeometry
    engine: str
    training: ParallelMesh
    expert: int
    tensor: int


class Heard(NamedTuple):
    """The data that one rank receives: the rosters of weights held and wanted by all, and each rank's own part."""

    rosters: tuple[list[bytes], list[bytes]]
    own: list[bytes]


class Measured(NamedTuple):
    """A line of the table."""

    name: str
    weights: int
    classes: int
    mib_received: float
    exchange_seconds: float
    plan_seconds: float
    own_part_seconds: float
    pieces: int
    gigabytes: float


def main(argv: Sequence[str] | None = None) -> int:
    """Plans every case and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/planning-<time>.json")
    options = parser.parse_args(argv)
    heads = ("weights", "classes", "MiB received", "exchange s", "plan s", "own part s", "pieces", "GB per rank")
    sys.stdout.write(f"{'':46}" + "".join(f"{head:>14}" for head in heads) + "\n")
    found = []
    for case in cases():
        if options.only in case.name:
            found.append(measured(case, options.repeats))
            sys.stdout.write(line(found[-1]) + "\n")
            sys.stdout.flush()
    if options.record:
        path = HERE / "results" / f"planning-{time.strftime('%Y-%m-%d-%H%M')}.json"
        write_record(path, ["numpy"], {"planning": [row._asdict() for row in found]})
    return 0


def cases() -> list[Case]:
    """The planned transition."""

    def mesh(data: int, pipeline: int, tensor: int) -> ParallelMesh:
        return ParallelMesh({"data": data, "pipeline": pipeline, "sequence": 1, "tensor": tensor})

    return [
        Case("70B, megatron 8-8-16 -> vllm 4", LLAMA_70B, "megatron", mesh(16, 8, 8), 1, 4),
        Case("70B, megatron 8-8-16 -> vllm 8", LLAMA_70B, "megatron", mesh(16, 8, 8), 1, 8),
        Case("70B, megatron 8-8-64 -> vllm 8", LLAMA_70B, "megatron", mesh(64, 8, 8), 1, 8),
        Case("70B, fsdp 1024 -> vllm 8", LLAMA_70B, "fsdp", mesh(1024, 1, 1), 1, 8),
        Case("70B, fsdp 4096 -> vllm 8", LLAMA_70B, "fsdp", mesh(4096, 1, 1), 1, 8),
        Case("30B-A3B, megatron 1-4-16, expert 8 -> vllm 4", QWEN3_30B_A3B, "megatron", mesh(16, 1, 4), 8, 4),
        Case("30B-A3B, fsdp 64 -> vllm 4", QWEN3_30B_A3B, "fsdp", mesh(64, 1, 1), 1, 4),
        Case("671B, megatron 4-8-32, expert 32 -> vllm 32", MOE_671B, "megatron", mesh(32, 4, 8), 32, 32),
    ]


def measured(case: Case, repeats: int) -> Measured:
    """A line of the table."""
    heard = messages(case)
    rank = len(heard.own) // 2 + 1
    received = sum(exchange_bytes(said) for said in (*heard.rosters, heard.own))
    own = tellers(case)(rank)
    seconds = [timed_rank(own, heard, rank) for _ in range(repeats)]
    plan = planned(exchanged(own, heard))
    assert plan.bytes_received(rank) == lower_bound(plan, rank), "a rank receives what it does not hold"
    return Measured(
        name=case.name,
        weights=sum(len(route.weights.names) for route in plan.routes),
        classes=len(plan.routes),
        mib_received=received / MIB,
        exchange_seconds=min(each[0] for each in seconds),
        plan_seconds=min(each[1] for each in seconds),
        own_part_seconds=min(each[2] for each in seconds),
        pieces=len(plan.received_by(rank)),
        gigabytes=plan.bytes_received(rank) / 1e9,
    )


def exchange_bytes(said: Sequence[bytes]) -> int:
    """Bytes that each rank receives in `Transport.gather_messages`, given the messages of all ranks."""
    return len(said) * (DIGEST_BYTES + 8) + 2 * sum(map(len, set(said)))


def lower_bound(plan: ReshardPlan, rank: int) -> int:
    """Bytes that a rank wants and does not hold: the least that any plan can send it."""
    return sum(
        volume(box) * wanted.itemsize
        for wanted in plan.destinations[rank]
        for box in uncovered(wanted.box, plan.sources[rank].boxes_of(wanted.name))
    )


def timed_rank(own: Callable[[], Member], heard: Heard, rank: int) -> tuple[float, float, float]:
    """Seconds in which a rank exchanges, plans and lists its own part."""
    gc.collect()
    exchange, members = timed(lambda: exchanged(own, heard))
    planning, plan = timed(lambda: planned(members))
    listing, _ = timed(lambda: (plan.received_by(rank), plan.sent_by(rank), plan.kept_by(rank)))
    return exchange, planning, listing


def line(row: Measured) -> str:
    """The line as text."""
    numbers = "".join(f"{number:>14.2f}" if isinstance(number, float) else f"{number:>14}" for number in row[1:])
    return f"{row.name:46}{numbers}"


def exchanged(own: Callable[[], Member], heard: Heard) -> list[Member]:
    """The exchange before planning: a rank sends its part, and reads those of all ranks."""
    member = own()
    json.dumps(member.own).encode()
    assert all(message in said for message, said in zip(member.messages, heard.rosters, strict=True))
    return members_from(heard.rosters, [json.loads(message) for message in heard.own])


def planned(members: Sequence[Member]) -> ReshardPlan:
    """The plan of a rank."""
    dtypes = wire_dtypes(members)
    return make_plan(
        transferred([member.holds for member in members], dtypes),
        transferred([member.wants for member in members], dtypes),
        nodes=[member.node for member in members],
        neighbors=neighbors_of(members),
    )


def messages(case: Case) -> Heard:
    """The messages of all ranks; equal messages are one object, as in `gather_messages`."""
    teller = tellers(case)
    held: list[bytes] = []
    wanted: list[bytes] = []
    own: list[bytes] = []
    arrived: dict[bytes, bytes] = {}
    for rank in range(case.training.size):
        member = teller(rank)()
        for said, message in zip((held, wanted), member.messages, strict=True):
            said.append(arrived.setdefault(message, message))
        own.append(json.dumps(member.own).encode())
    return Heard((held, wanted), own)


def tellers(case: Case) -> Callable[[int], Callable[[], Member]]:
    """For a rank, what makes its `Member` from lists of its own."""
    copies = TRAINING_ENGINES[TrainingEngine[case.engine]].copies(case.training.sizes, 1)
    generating = generation_mesh(case.training, copies=copies, tensor=case.tensor, pipeline=1)
    group = {rank: number for number, ranks in enumerate(micro_data_groups(generating)) for rank in ranks}
    sources, destinations = training_layout(case), rollout(case.geometry, generating)

    def of_rank(rank: int) -> Callable[[], Member]:
        held, wanted = sources(rank), destinations(rank)
        return lambda: Member(f"node{rank // DEVICES_PER_NODE}", group[rank], declared(held), declared(wanted))

    return of_rank


def training_layout(case: Case) -> Layout:
    """The holdings of the ranks of a case."""
    if case.engine == "megatron":
        return megatron(case.geometry, case.training, expert=case.expert)
    return fsdp(case.geometry, case.training.size)


def declared(holdings: Sequence[Holding]) -> Declared:
    """A rank's description of some holdings in bfloat16."""
    return Declared.of((name, "bfloat16", shape, box) for name, shape, box, _ in holdings)


def timed(work: Callable[[], ResultT]) -> tuple[float, ResultT]:
    """Seconds of this process that it takes, and what comes of it."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


if __name__ == "__main__":
    sys.exit(main())
