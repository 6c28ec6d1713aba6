"""Where the time of our steps goes: a profile of a workload of step.py, and the rate that its matrix products reach.

    python benchmarks/profile_step.py [--workload W] [--size tiny] [--algorithm grpo] [--steps 4] [--record]

Runs one process with `trainer.backend=local`, and profiles its steps after the first ones with torch.profiler. Shares
are of the seconds of the main thread, whose operations have several threads; `Python and other` is what no operation of
PyTorch accounts for. Profiling itself takes time for each operation, so decoding, which has many small ones, appears
slower than it is.

The products of decoding are also timed alone: random matrices of the same shapes through the same functions, whose
right operands lie in memory as the weights of linear layers do.
"""

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median

import torch
from record import HERE, run_reporting, write_record
from step import CACHE
from systems import Case, Effort, our_settings
from torch.profiler import ProfilerActivity, profile, record_function
from workload import SHAPES, SIZES, build_workload

import hybridflow
from hybridflow.engines.rollout.shell import RolloutShell

DECODING = "decoding"
PRODUCTS = {"aten::mm": torch.mm, "aten::addmm": torch.addmm, "aten::bmm": torch.bmm, "aten::baddbmm": torch.baddbmm}
KINDS = {
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
    "optimizer": ("aten::_fused_adamw", "aten::_foreach"),
    "other operations": ("aten::",),
}
"""How the names of operations begin, apart from matrix products."""

REST = "Python and other"
TIMED_CALLS = 20

Product = tuple[str, tuple[tuple[int, ...], ...]]
"""The name of a matrix product, and the shapes of its operands."""


@dataclass(frozen=True)
class Operation:
    """One operation: its own seconds, without those of operations within it, and whether it belongs to decoding."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float
    is_decoding: bool

    @property
    def kind(self) -> str | None:
        """Its kind; None if it is none of PyTorch's operations."""
        if self.name in PRODUCTS:
            return "matrix products"
        return next((kind for kind, starts in KINDS.items() if self.name.startswith(starts)), None)


@dataclass(frozen=True)
class Part:
    """All of a step, or its decoding: seconds, shares of them by kind, operations and seconds of matrix products."""

    seconds: float
    shares: dict[str, float]
    product_flops: float
    product_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles, and shows the table."""
    options = parsed(argv)
    algorithm = options.algorithm or SHAPES[options.workload].algorithms[0]
    rate = run_reporting([sys.executable, str(HERE / "matrix_rate.py"), str(options.threads)], 60)
    if rate is None:
        return 1
    case = Case("hybridflow", algorithm, options.size, "transformers", "local", workload=options.workload)
    effort = Effort(options.warmup + options.steps, options.threads, math.inf)
    seconds, operations, decoding_seconds = profiled(case, effort, options.warmup, options.cache)
    parts = {"whole step": part_of(operations, seconds, options.steps)}
    of_decoding = [operation for operation in operations if operation.is_decoding]
    alone = None
    if of_decoding:
        parts[DECODING] = part_of(of_decoding, decoding_seconds, options.steps)
        torch.set_num_threads(options.threads)
        alone = seconds_alone(of_decoding) / options.steps
    sys.stdout.write(f"{case.title}, {options.steps} steps\n" + table(parts, rate["flops"], alone))
    if options.record:
        measured = {name: asdict(part) for name, part in parts.items()}
        case_and_rate = {"case": asdict(case), "threads": options.threads, "matrix_rate": rate["flops"]}
        write_record(
            options.results / f"profile_step-{time.strftime('%Y-%m-%d-%H%M')}.json",
            ["transformers"],
            {**case_and_rate, "parts": measured, "decoding_products_alone_seconds": alone},
        )
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(SHAPES), default="W")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--algorithm", help="one of the workload's; the first by default")
    parser.add_argument("--steps", type=int, default=4, help="steps that are profiled")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the workloads' models and rows are kept")
    parser.add_argument("--record", action="store_true", help="write profile_step-<time>.json")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    known = SHAPES[options.workload].algorithms
    if options.algorithm not in (None, *known):
        parser.error(f"workload {options.workload} has the algorithms {', '.join(known)}")
    return options


def profiled(case: Case, effort: Effort, warmup: int, cache: Path) -> tuple[float, list[Operation], float]:
    """Seconds of the steps after the warm-up, their operations, and the seconds of decoding."""
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    clock: list[float] = []

    def after_step(step: int, metrics: dict[str, float]) -> None:
        if step == warmup:
            profiler.start()
            clock.append(time.perf_counter())
        elif step == effort.steps:
            clock.append(time.perf_counter())
            profiler.stop()

    RolloutShell.generate = annotated(RolloutShell.generate)
    with tempfile.TemporaryDirectory() as scratch:
        settings = our_settings(case, build_workload(cache), effort, Path(scratch))
        hybridflow.run(case.algorithm, settings, callbacks=[after_step])
    events = profiler.events() or []
    ranges = [event.time_range for event in events if event.name == DECODING]
    operations = [
        Operation(
            event.name,
            tuple(tuple(shape) for shape in event.input_shapes or ()),
            event.self_cpu_time_total / 1e6,
            any(one.start <= event.time_range.start < one.end for one in ranges),
        )
        for event in events
    ]
    return clock[1] - clock[0], operations, sum(one.end - one.start for one in ranges) / 1e6


def annotated(generate: Callable) -> Callable:
    """The method, with a range in the profile."""

    @wraps(generate)
    def wrapped(*arguments: object, **settings: object) -> object:
        with record_function(DECODING):
            return generate(*arguments, **settings)

    return wrapped


def part_of(operations: Sequence[Operation], seconds: float, steps: int) -> Part:
    """Shares of the operations in the seconds of so many steps; numbers are per step."""
    shares = dict.fromkeys(("matrix products", *KINDS), 0.0)
    for operation in operations:
        if operation.kind is not None:
            shares[operation.kind] += operation.seconds / seconds
    flops = sum(2 * math.prod(left) * right[-1] for (left, right), _ in products(operations))
    return Part(
        seconds / steps, shares | {REST: 1.0 - sum(shares.values())}, flops / steps,
        shares["matrix products"] * seconds / steps,
    )  # fmt: skip


def products(operations: Sequence[Operation]) -> Iterator[tuple[tuple[tuple[int, ...], ...], Product]]:
    """The two factors' shapes of each matrix product, and the product."""
    for operation in operations:
        if operation.name in PRODUCTS:
            shapes = operation.shapes[: 3 if "add" in operation.name else 2]
            yield shapes[-2:], (operation.name, shapes)


def seconds_alone(operations: Sequence[Operation]) -> float:
    """Seconds of the same matrix products one after the other, with random matrices: the median call of each shape."""
    found = Counter(product for _, product in products(operations))
    return sum(count * _seconds_of(name, shapes) for (name, shapes), count in found.items())


def _seconds_of(name: str, shapes: Sequence[tuple[int, ...]]) -> float:
    *others, right = (torch.randn(shape) for shape in shapes)
    factors = [*others, right.mT.contiguous().mT]
    taken = []
    with torch.no_grad():
        for _ in range(TIMED_CALLS):
            started = time.perf_counter()
            PRODUCTS[name](*factors)
            taken.append(time.perf_counter() - started)
    return median(taken)


def table(parts: dict[str, Part], rate: float, alone: float | None) -> str:
    """A column per part; `alone` are the seconds per step of decoding's products alone."""
    rows = [("", [*parts]), ("seconds per step", [f"{part.seconds:.3f}" for part in parts.values()])]
    rows += [(kind, [f"{part.shares[kind]:.0%}" for part in parts.values()]) for kind in parts["whole step"].shares]
    rates = [part.product_flops / part.product_seconds if part.product_seconds else 0.0 for part in parts.values()]
    rows.append(("products, GFLOP/s", [f"{found / 1e9:.0f}" for found in rates]))
    rows.append((f"share of {rate / 1e9:.0f} GFLOP/s", [f"{found / rate:.0%}" for found in rates]))
    lines = [f"{name:24}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows]
    if alone is not None:
        own = parts[DECODING].product_seconds
        lines.append(f"products of decoding: {own:.3f} s per step; alone {alone:.3f} s, {alone / own:.0%} of that")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
