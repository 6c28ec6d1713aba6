"""Seconds of a whole command that trains one step of the built-in task, in phases: with transformers, vLLM, and on Ray.

    python benchmarks/first_step.py [--repeats 3] [--cases vllm] [--record]

A phase ends with a line of the command: see `PHASES`. `composed` includes the start of Python;
`libraries` their imports; `data and models` all that is read, and the start of the processes and of vLLM; `exit` the
saving of the checkpoint, the report, and the end of the process. Each number is of the quickest command of several.
CPU seconds are of the command and the processes that it has waited for, which those of Ray's workers are not.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.record import HERE, environment, write_record

COMMAND = (sys.executable, "-m", "hybridflow", "grpo", "trainer.total_steps=1")
CASES = {"transformers": [], "vllm": ["rollout.engine=vllm"], "ray": ["trainer.backend=ray"]}
PHASES = {
    "composed": "starting  ",
    "libraries": "device=cpu (",
    "data and models": "all roles have started",
    "evaluation": "eval  step 0",
    "first step": "step 1/1",
}
"""The phases, and what the line that ends each of them contains."""


class Measured(NamedTuple):
    """A line of the table: one command."""

    case: str
    wall_seconds: float
    cpu_seconds: float
    phases: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every case and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/first_step-<time>.json")
    options = parser.parse_args(argv)
    heads = ("wall s", "CPU s", *PHASES, "exit")
    sys.stdout.write(f"{'':14}" + "".join(f"{head:>17}" for head in heads) + "\n")
    found = []
    for case in options.cases:
        found += [measured(case) for _ in range(options.repeats)]
        best = min(found[-options.repeats :], key=lambda one: one.wall_seconds)
        numbers = (best.wall_seconds, best.cpu_seconds, *best.phases.values())
        sys.stdout.write(f"{case:14}" + "".join(f"{number:17.2f}" for number in numbers) + "\n")
        sys.stdout.flush()
    if options.record:
        path = HERE / "results" / f"first_step-{time.strftime('%Y-%m-%d-%H%M')}.json"
        write_record(path, ["transformers", "ray"], {"first_step": [one._asdict() for one in found]})
    return 0


def measured(case: str) -> Measured:
    """Runs the command of a case in a new directory, and times its lines as they arrive."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ends, lines = dict.fromkeys(PHASES, 0.0), []
    with tempfile.TemporaryDirectory() as directory:
        command = subprocess.Popen(
            [*COMMAND, *CASES[case]],
            cwd=directory,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stderr is not None, "standard error is a pipe"
        for line in command.stderr:
            lines.append(line)
            ends |= {phase: time.perf_counter() - began for phase, said in PHASES.items() if said in line}
        status = command.wait()
        wall_seconds = time.perf_counter() - began
    if status or not all(ends.values()):
        raise RuntimeError(f"exit status {status}: {''.join(lines[-20:])}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = [0.0, *ends.values(), wall_seconds]
    names = [*PHASES, "exit"]
    phases = {name: times[place + 1] - times[place] for place, name in enumerate(names)}
    return Measured(case, wall_seconds, cpu_seconds, phases)


if __name__ == "__main__":
    sys.exit(main())
