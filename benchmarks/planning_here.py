"""Seconds and memory of real steps on this machine next to the predictions of the planner, after calibration.

    python benchmarks/planning_here.py [--devices FILE.yaml] [--only TEXT ...] [--record]

Calibrates this machine (or reads FILE.yaml, which `hybridflow plan --calibrate` has written), then runs a few steps
of PPO of the built-in model and of stories15M (in `$HYBRIDFLOW_ASSETS/models`), and of GRPO of a Llama of 100M
parameters with random weights, with every engine on 1, 2 and 4 processes of one thread. A line for each run has the
seconds of each phase (generation; log-probabilities and values; updates; publishing), of the step, and the peak memory
of a process in GiB, each as prediction/measurement and error. Then, for each model, how many pairs of layouts are in
the measured order. Needs a machine on which nothing else runs.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from time import strftime

from benchmarks.planning_here_runs import STEPS, Case, RunFailed, all_cases, run
from benchmarks.record import HERE, write_record
from hybridflow.errors import DataError
from hybridflow.launch.calibration import calibrate_devices
from hybridflow.launch.recorded_run import RecordedRun

PHASES = {
    "generate": ("generate",),
    "forward": ("logprobs", "values"),
    "update": ("update",),
    "publish": ("publish_weights",),
}
"""Phases of a step, and the methods whose calls they add up."""

TARGETS = {**dict.fromkeys(PHASES, 0.35), "step": 0.35, "memory": 0.15}
NOTICEABLE = 0.02
"""Phases that take less of a step, measured and predicted, are not counted."""

SAME = 0.1
"""Layouts whose measured steps differ by less are not compared."""


@dataclass(frozen=True)
class Compared:
    """The predictions and the measurements of a run."""

    case: Case
    predicted: Mapping[str, float]
    """Seconds by phase, and the GiB of `memory`."""

    measured: Mapping[str, float]

    def error(self, name: str) -> float | None:
        """The error of a prediction as a fraction; None for a phase that takes no noticeable time."""
        found, wanted = self.predicted[name], self.measured[name]
        if name in PHASES and max(found, wanted) < NOTICEABLE * self.measured["step"]:
            return None
        return found / wanted - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases, and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=Path, metavar="FILE.yaml", help="the calibrated device of this machine")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose title has one of these in it")
    parser.add_argument("--runs", type=Path, help="keep the runs in this directory, and use those that are there")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/planning_here-<time>.json")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.runs or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        devices = options.devices or scratch / "devices.yaml"
        if not devices.exists():
            calibrate_devices(devices, _say)
        found = []
        _say(_line("", {name: f"{name} predicted/measured" for name in TARGETS}))
        for case in all_cases():
            if any(text in case.title for text in options.only):
                found += _compared(case, scratch, devices)
    for line in _conclusions(found):
        _say(line)
    if options.record:
        rows = [asdict(each) | {"errors": {name: each.error(name) for name in TARGETS}} for each in found]
        path = HERE / "results" / f"planning_here-{strftime('%Y-%m-%d-%H%M')}.json"
        write_record(path, ["transformers"], {"planning_here": rows, "conclusions": _conclusions(found)})
    return 0


def compared(case: Case, run_dir: Path, devices: Path) -> Compared:
    """The predictions for a run that has ended, and what it measured."""
    recorded = RecordedRun(run_dir)
    step, measured = recorded.planned_on(recorded.devices(str(devices))), recorded.measured()
    operations = step.request.operations
    seconds = dict(zip([each.name for each in operations], step.operation_seconds(), strict=True))
    own = measured.seconds_of(operations)

    def phases(by_call: Mapping[str, float]) -> dict[str, float]:
        return {
            phase: sum(value for name, value in by_call.items() if name.partition(".")[2] in methods)
            for phase, methods in PHASES.items()
        }

    memory = max(phase.total for pool in step.pools for phase in step.phases(pool))
    predicted = phases({name: each.total for name, each in seconds.items()})
    return Compared(
        case,
        predicted | {"step": step.seconds, "memory": memory / 2**30},
        phases(own) | {"step": measured.seconds, "memory": max(measured.peak_bytes.values()) / 2**30},
    )


def _compared(case: Case, scratch: Path, devices: Path) -> list[Compared]:
    run_dir = scratch / case.title.replace(" ", "_")
    try:
        try:
            found = compared(case, run_dir, devices)
        except DataError:  # it has not run, or was interrupted
            run(case, scratch, Path(os.environ.get("HYBRIDFLOW_ASSETS", "")))
            found = compared(case, run_dir, devices)
    except RunFailed as failure:
        _say(str(failure))
        return []
    cells = {}
    for name in TARGETS:
        error = found.error(name)
        cells[name] = "" if error is None else f"{found.predicted[name]:.3g}/{found.measured[name]:.3g} {error:+.0%}"
    _say(_line(case.title, cells))
    return [found]


def _conclusions(found: Sequence[Compared]) -> list[str]:
    """How many predictions are within the target, and how many pairs of layouts are in the measured order."""
    lines = []
    for name, target in TARGETS.items():
        errors = [abs(error) for each in found if (error := each.error(name)) is not None]
        if errors:
            within = sum(error <= target for error in errors)
            lines.append(
                f"{name}: {within} of {len(errors)} within {target:.0%}, median error {median(errors):.0%},"
                f" largest {max(errors):.0%}"
            )
    for model in STEPS:
        steps = [(each.predicted["step"], each.measured["step"]) for each in found if each.case.model == model]
        pairs = [
            (first[0] < second[0]) == (first[1] < second[1])
            for first, second in combinations(steps, 2)
            if abs(first[1] / second[1] - 1) > SAME
        ]
        lines.append(f"{model}: {sum(pairs)} of {len(pairs)} pairs of layouts in the measured order")
    return lines


def _line(title: str, cells: Mapping[str, str]) -> str:
    return f"{title:36}" + "".join(f"{cell:>26}" for cell in cells.values())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
