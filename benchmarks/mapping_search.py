"""Seconds and peak memory of the search for a placement, on cost tables of realistic sizes and trade-offs, and with the
cost models of `hybridflow.mapping`.

    python benchmarks/mapping_search.py [--only TEXT] [--record]

The tables are made from formulas much simpler than the cost models, before the clock starts: each unit has up to 200
options on each number of devices, in which parallel sizes, microbatches, recomputation and offloading trade time for
memory. Models of 13B parameters, or of 70B at 1,024 devices, on devices of 80 GB. `placements` and `allocations` are
those of all devices that the paper's Algorithm 1 would enumerate; `evaluated` counts the allocations whose options the
search examined. Cases with the name of an engine are those of `hybridflow plan`: Llama models on A100-80, with the cost
models, whose time counts. Each case runs in its own process, and `s` are the seconds of processor time of that process.
"""

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from record import HERE, run_reporting, write_record

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.operations import Operation, OperationKind, Option
from hybridflow.mapping.partitions import Restrictions, partitions
from hybridflow.mapping.planner import answer
from hybridflow.mapping.request import PlannedModel, PlannedRollout, Request
from hybridflow.mapping.search import Plan, Problem, search
from hybridflow.mapping.tables import MemoryLimit
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.catalogue import find_model

GB = 1e9
MEMORY = 72 * GB
FLOPS = 312e12 * 0.45
BANDWIDTH = 2e12 * 0.6
NETWORK_LINK = 25e9
HOST_LINK = 32e9
ROWS = 1024
MINIBATCHES = 8
TOKENS_PER_ROW = 2048
CACHE_PER_PARAMETER = 0.12
"""Bytes of a row's KV cache per parameter of the model."""
MOST_OPTIONS = 200


@dataclass(frozen=True)
class Case:
    """A dataflow on a cluster."""

    name: str
    models: tuple[str, ...]
    """The scoring models; the actor, its rollout and the critics of `critics` are in every case."""

    critics: tuple[str, ...]
    num_devices: int
    granularity: int = 1
    billions: float = 13.0
    rollout_with_actor: bool = False
    num_plans: int = 5
    lag: int = 0
    engines: tuple[TrainingEngine, ...] = ()
    """The engines among which the search with the cost models chooses; none for cost tables."""


MEGATRON, FSDP = (TrainingEngine.megatron,), (TrainingEngine.fsdp,)
CASES = [
    Case("PPO, 16 by device", ("reference", "reward"), ("critic",), 16),
    Case("PPO, 64 by device", ("reference", "reward"), ("critic",), 64),
    Case("PPO, 128 by device", ("reference", "reward"), ("critic",), 128),
    Case("PPO, 1,024 by node", ("reference", "reward"), ("critic",), 1024, 8, 70.0),
    Case("PPO, 128 by device, rollout with actor", ("reference", "reward"), ("critic",), 128, rollout_with_actor=True),
    Case("PPO, 128 by node, rollout with actor", ("reference", "reward"), ("critic",), 128, 8, rollout_with_actor=True),
    Case("PPO, 128 by device, one step off", ("reference", "reward"), ("critic",), 128, lag=1),
    Case("PPO, 128 by device, all placements", ("reference", "reward"), ("critic",), 128, num_plans=52),
    Case("Safe RLHF, 128 by device", ("reference", "reward", "cost"), ("critic",), 128),
    Case("Safe RLHF, 1,024 by node", ("reference", "reward", "cost"), ("critic",), 1024, 8, 70.0),
    Case(
        "Safe RLHF, 128 by device, rollout with actor",
        ("reference", "reward", "cost"),
        ("critic",),
        128,
        rollout_with_actor=True,
    ),
    Case(
        "Safe RLHF, 128 by node, rollout with actor",
        ("reference", "reward", "cost"),
        ("critic",),
        128,
        8,
        rollout_with_actor=True,
    ),
    Case(
        "Safe RLHF with a cost critic, 128 by device", ("reference", "reward", "cost"), ("critic", "cost_critic"), 128
    ),
    Case("PPO, 128 by device, megatron", ("reference", "reward"), ("critic",), 128, engines=MEGATRON),
    Case("PPO, 128 by device, fsdp", ("reference", "reward"), ("critic",), 128, engines=FSDP),
    Case("PPO, 128 by device, megatron or fsdp", ("reference", "reward"), ("critic",), 128, engines=MEGATRON + FSDP),
    Case(
        "PPO, 1,024 by node, megatron or fsdp",
        ("reference", "reward"),
        ("critic",),
        1024,
        8,
        70.0,
        engines=MEGATRON + FSDP,
    ),
    Case(
        "Safe RLHF, 1,024 by node, megatron or fsdp",
        ("reference", "reward", "cost"),
        ("critic",),
        1024,
        8,
        70.0,
        engines=MEGATRON + FSDP,
    ),
]


class TableCosts:
    """Options by unit and devices."""

    def __init__(self, tables: Mapping[tuple[tuple[str, ...], int], Sequence[Option]]) -> None:
        self.tables = tables

    def options(self, unit: tuple[str, ...], sizes: Sequence[int]) -> Sequence[Sequence[Option]]:
        return [self.tables[unit, size] for size in sizes]


@dataclass(frozen=True)
class Layout:
    """One way to run a model."""

    data: int
    shared: int
    """Devices that share a copy of the weights: pipeline times tensor."""

    pipeline: int
    tensor: int
    microbatch: int
    recomputes: bool
    offloads: bool


def operations(case: Case) -> tuple[Operation, ...]:
    """The step of PPO, or of Safe RLHF, with the functions that compute advantages."""
    kinds = OperationKind
    calls = [("rollout", "generate", kinds.generate, ())]
    calls += [(role, "score", kinds.forward, (0,)) for role in case.models if role != "reference"]
    calls += [(role, "values", kinds.forward, (0,)) for role in case.critics]
    calls += [(role, "logprobs", kinds.forward, (0,)) for role in ("actor", "reference")]
    calls += [("advantages", "advantages", kinds.functions, tuple(range(1, len(calls))))]
    advantages = len(calls) - 1
    calls += [(role, "update", kinds.update, (advantages,)) for role in (*case.critics, "actor")]
    calls += [("actor", "publish_weights", kinds.publish, (len(calls) - 1,))]
    return tuple(Operation(f"{role}.{method}", role, kind, needs) for role, method, kind, needs in calls)


def layouts(num_devices: int, is_trained: bool) -> Iterator[Layout]:
    """The layouts of a model on a pool, of which some devices may be left over."""
    switch = (False, True)
    for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 4, 8)):
        for microbatch, recomputes, offloads in product((1, 2, 4, 8), switch[: 1 + is_trained], switch):
            if tensor * pipeline <= num_devices:
                data = num_devices // (tensor * pipeline)
                yield Layout(data, tensor * pipeline, pipeline, tensor, microbatch, recomputes, offloads)


def pass_seconds(layout: Layout, parameters: float, minibatches: int = 1) -> float:
    """Seconds of a forward pass over all tokens, minibatch after minibatch."""
    rows = math.ceil(ROWS / minibatches / layout.data)
    microbatch = min(rows, layout.microbatch)
    bubble = 1.0 + (layout.pipeline - 1) / math.ceil(rows / microbatch)
    efficiency = (1.0 - 0.06 * math.log2(layout.tensor)) * microbatch / (microbatch + 0.3)
    work = 2.0 * parameters / layout.shared * rows * TOKENS_PER_ROW
    return minibatches * (work * bubble / (FLOPS * efficiency) + 0.02)


def generate_seconds(num_devices: int, tensor: int, parameters: float, cache_bytes: float) -> float:
    """Seconds to generate all responses, in as many waves as the cache requires."""
    rows = math.ceil(ROWS * tensor / num_devices)
    used = rows * CACHE_PER_PARAMETER * parameters / tensor
    token = (2.0 * parameters / tensor + min(used, cache_bytes)) / BANDWIDTH + 2e-5 * tensor**1.5
    return max(1.0, used / cache_bytes) * TOKENS_PER_ROW / 2 * token


def model_options(unit: tuple[str, ...], num_devices: int, parameters: float) -> Iterator[Option]:
    """The options of a model, and of the rollout in the actor's processes."""
    is_trained = "actor" in unit or "critic" in unit[-1]
    for layout in layouts(num_devices, is_trained):
        weights = 2.0 * parameters / layout.shared
        state = weights * 3 + 12.0 * parameters / num_devices if is_trained else weights
        kept = layout.microbatch * 2.4e6 * parameters**0.5 / layout.shared
        forward = pass_seconds(layout, parameters)
        seconds = [forward + (weights / HOST_LINK if layout.offloads else 0.0)]
        if is_trained:
            kept *= 0.1 if layout.recomputes else 1.0
            moved = state / HOST_LINK if layout.offloads else 0.0
            update = pass_seconds(layout, parameters, MINIBATCHES) * (4 if layout.recomputes else 3)
            seconds.append(update + MINIBATCHES * 2 * weights / NETWORK_LINK + moved)
        if "actor" in unit:
            seconds.append(weights / NETWORK_LINK)
        resident, extra = (0.0, state + kept) if layout.offloads else (state, kept)
        if "rollout" not in unit:
            yield Option(layout, tuple(seconds), resident, extra)
            continue
        for option in rollout_options(num_devices, parameters):
            yield Option(
                (layout, option.choice),
                (*option.seconds, *seconds),
                resident + option.resident_bytes,
                max(extra, option.extra_bytes),
            )


def rollout_options(num_devices: int, parameters: float) -> Iterator[Option]:
    """The options of the rollout."""
    for tensor, gigabytes, sleeps in product((1, 2, 4, 8), (5, 10, 20, 30, 40), (False, True)):
        if tensor <= num_devices:
            taken = 2.0 * parameters / tensor + gigabytes * 1e9
            seconds = generate_seconds(num_devices, tensor, parameters, gigabytes * 1e9) + 2.0 * sleeps
            memory = (0.0, taken) if sleeps else (taken, 0.0)
            yield Option((tensor, gigabytes, sleeps), (seconds,), *memory)


def options(unit: tuple[str, ...], num_devices: int, case: Case) -> list[Option]:
    """At most 200 options of a unit on some devices, spread over those that fit by memory."""
    parameters = case.billions * 1e9
    of_unit = rollout_options if unit == ("rollout",) else partial(model_options, unit)
    found = [each for each in of_unit(num_devices, parameters) if each.resident_bytes + each.extra_bytes <= MEMORY]
    found.sort(key=lambda option: (option.resident_bytes, sum(option.seconds)))
    return found[:: math.ceil(len(found) / MOST_OPTIONS) or 1]


def cost_tables(case: Case) -> TableCosts:
    """The options of all units on all sizes."""
    units = [(role,) for role in placed_roles(case)] + [("rollout", "actor")]
    sizes = range(case.granularity, case.num_devices + 1, case.granularity)
    return TableCosts({(unit, size): options(unit, size, case) for unit in units for size in sizes})


def placed_roles(case: Case) -> list[str]:
    """The roles that need devices."""
    return list(dict.fromkeys(each.role for each in operations(case) if each.role != "advantages"))


def request(case: Case) -> Request:
    """A case as `hybridflow plan` asks the planner; models are of the Llama family."""
    geometry = find_model(f"{case.billions:g}B").geometry

    def planned(role: str) -> PlannedModel:
        is_trained, has_head = role in ("actor", *case.critics), role in ("actor", "reference")
        return PlannedModel(
            role, ModelUse(geometry, 2, is_trained=is_trained, has_language_head=has_head), case.engines
        )

    workload = Workload(ROWS, *[Lengths.constant(TOKENS_PER_ROW / 2)] * 2, optimizer_steps=MINIBATCHES)
    return Request(
        title=case.name,
        operations=tuple(
            replace(each, role="rollout") if each.kind is OperationKind.publish else each for each in operations(case)
        ),
        models=tuple(planned(role) for role in placed_roles(case) if role != "rollout"),
        rollout=PlannedRollout("rollout", "actor", ModelUse(geometry, 2, is_trained=False), "vllm"),
        workload=workload,
        cluster=cluster_of(f"{case.num_devices // 8}x8xA100-80"),
        minibatch_prompts=ROWS // MINIBATCHES,
        batch_prompts=ROWS,
    )


def measured(case: Case) -> dict[str, object]:
    """A line of the table."""
    if not case.engines:
        return measured_on_tables(case)
    asked, before, start = request(case), peak_bytes(), time.process_time()
    plan = answer(asked, num_plans=case.num_plans).plans[0].plan
    return {"name": case.name, **used(start, before), **found_plan(plan)}


def measured_on_tables(case: Case) -> dict[str, object]:
    """A line of the table, of a search on cost tables."""
    costs = cost_tables(case)
    before = peak_bytes()
    pinned = {"rollout": "actor", "actor": "actor"} if case.rollout_with_actor else {}
    rules = Restrictions(pool_of=pinned, granularity=case.granularity)
    joint = [("rollout", "actor")]
    problem = Problem(
        operations=operations(case),
        costs=costs,
        num_devices=case.num_devices,
        memory=MemoryLimit(MEMORY),
        joint=joint,
        fixed_seconds={"advantages": (0.2,)},
        lag=case.lag,
        restrictions=rules,
    )
    start = time.process_time()
    found = search(problem, num_plans=case.num_plans)
    spent = used(start, before)
    slots = case.num_devices // case.granularity
    counts = [len(table) for table in costs.tables.values()]
    return {
        "name": case.name,
        "placements": found.num_placements,
        "allocations": sum(math.comb(slots - 1, len(each) - 1) for each in partitions(problem.roles, joint, rules)),
        "evaluated": found.num_evaluated,
        "options": f"{min(counts)}-{max(counts)}",
        **spent,
        **found_plan(found.plans[0]),
    }


def used(start: float, before: float) -> dict[str, object]:
    """Processor time since `start`, and memory: in addition to the peak `before`, and in all."""
    seconds, peak = time.process_time() - start, peak_bytes()
    return {"seconds": seconds, "search_mib": (peak - before) / 2**20, "peak_mib": peak / 2**20}


def found_plan(plan: Plan) -> dict[str, object]:
    """The length and the pools of a plan."""
    pools = ", ".join(f"{'+'.join(pool.roles)} on {pool.num_devices}" for pool in plan.pools)
    return {"step_seconds": plan.schedule.seconds, "plan": pools}


def peak_bytes() -> int:
    """The most memory that this process has taken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def line(row: Mapping[str, object]) -> str:
    """A line of the table as text."""
    counts = ""
    if "placements" in row:
        counts = f"{row['placements']:>6}{row['allocations']:>18,}{row['evaluated']:>11,}{row['options']:>9}"
    costs = f"{row['seconds']:>8.2f}{row['search_mib']:>8.0f}{row['peak_mib']:>8.0f}"
    return f"{row['name']:48}{counts:44}{costs}  {row['plan']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Searches in every case and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/mapping_search-<time>.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        found = measured(next(case for case in CASES if case.name == arguments.case))
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    heads = f"{'places':>6}{'allocations':>18}{'evaluated':>11}{'options':>9}{'s':>8}{'MiB':>8}{'peak':>8}"
    sys.stdout.write(f"{'':48}{heads}  best plan\n")
    rows = []
    for case in CASES:
        if arguments.only in case.name:
            row = run_reporting([sys.executable, __file__, "--case", case.name], timeout=600)
            if row:
                rows.append(row)
                sys.stdout.write(line(row) + "\n")
                sys.stdout.flush()
    if arguments.record:
        path = HERE / "results" / f"mapping_search-{time.strftime('%Y-%m-%d-%H%M')}.json"
        write_record(path, ["numpy"], {"searches": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
