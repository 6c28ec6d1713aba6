"""Everything that one GPU can show, in one command of at most eight minutes, without Ray, vLLM or a network.

    python benchmarks/gpu.py                                   on a GPU
    python benchmarks/gpu.py --device cpu                      the same sections, tiny: a rehearsal
    python benchmarks/gpu.py --only engines,offload            some sections
    python benchmarks/gpu.py --model DIR --gsm8k DIR           a chat model and GSM8K for the section `gsm8k`

Sections run in the order of `SECTIONS`. One that fails is reported with its error, and the others continue; those for
which no time is left are reported as not run. The table goes to the terminal, all numbers to
benchmarks/results/gpu-<date>.json. The exit status is 1 when a section failed.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import gpu_engines
import gpu_runs
import torch
from gpu_case import Case, Row
from record import write_record

RESULTS = Path(__file__).parent / "results"
BUDGET_SECONDS = 480.0

SECTIONS: dict[str, Callable[[Case], list[Row]]] = {
    "engines": gpu_engines.engines_against_the_cpu,
    "attention": gpu_engines.packed_attention_beside_blocks,
    "offload": gpu_engines.offload_peaks,
    "decode": gpu_engines.generation_speed,
    "update": gpu_engines.update_speed,
    "long_prompts": gpu_runs.long_prompts_beside_trl,
    "short_prompts": gpu_runs.short_prompts_beside_trl,
    "learning": gpu_runs.built_in_task,
    "gsm8k": gpu_runs.gsm8k,
}
"""The measurements, the most informative first."""


@dataclass(frozen=True)
class Done:
    """One section: its rows, its seconds, and what went wrong, if anything."""

    section: str
    rows: list[Row]
    seconds: float
    problem: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes; the exit status."""
    options = parsed(argv)
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        sys.stderr.write(f"There is no section '{unknown[0]}'. Sections: {', '.join(SECTIONS)}.\n")
        return 2
    started = time.perf_counter()
    path = options.results / f"gpu-{datetime.now():%Y-%m-%d-%H%M}.json"
    done = []
    with tempfile.TemporaryDirectory() as scratch:
        device = torch.device(options.device)
        case = Case(device, Path(scratch), is_tiny=device.type == "cpu", model=options.model, gsm8k=options.gsm8k)
        sys.stdout.write(f"{case.device_name}, torch {torch.__version__}\n")
        for name in chosen:
            left = options.budget_seconds - (time.perf_counter() - started)
            done.append(run_section(name, case, left))
            sys.stdout.write(text_of(done[-1]))
            sys.stdout.flush()
            record = {"device": case.device_name, "sections": [asdict(section) for section in done]}
            write_record(path, ["transformers"], record)
    sys.stdout.write(f"{path}\n")
    return int(any(section.problem for section in done))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--model", type=Path, help="directory of a chat model, such as SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def run_section(name: str, case: Case, seconds_left: float) -> Done:
    """The section's rows, or what kept it from being measured."""
    if seconds_left <= 0:
        return Done(name, [], 0.0, "not run: no time was left")
    started = time.perf_counter()
    try:
        rows, problem = SECTIONS[name](case), None
    except Exception:  # noqa: BLE001 (a section that fails must not take the others with it)
        rows, problem = [], traceback.format_exc(limit=-6)
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
    return Done(name, rows, time.perf_counter() - started, problem)


def text_of(done: Done) -> str:
    """A section as lines of text."""
    lines = [f"\n{done.section} ({done.seconds:.1f} s)"]
    lines += [f"  {row.name:58} {row.value:>14.6g} {row.unit}" for row in done.rows]
    lines += [f"  {line}" for line in (done.problem or "").splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
