"""Runs of a few steps with the built-in model, one for each engine that is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.checks.engines import missing, name_of
from hybridflow.doctor.finding import Finding, ok, problem
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.observability.ending import REMEDY, read_ending, split_remedy
from hybridflow.observability.jsonlines import rows_by_step
from hybridflow.observability.trackers.jsonl import METRICS_FILE

_WHAT = "run"
_SECONDS = 60.0
_STEPS = 2
_SETTINGS = (
    f"trainer.total_steps={_STEPS}",
    "trainer.eval_every=0",
    f"trainer.save_every={_STEPS}",
    "trainer.trackers=[jsonl]",
    "data.batch_size=8",
    "actor.minibatch_size=null",
    "critic.minibatch_size=null",
)
_LAST_LINES = 8


def _trained(training: TrainingEngine, rollout: RolloutKind, place: Place) -> Iterator[Finding]:
    name = name_of(_WHAT, training, rollout)
    if absent := next(missing(name, training, rollout), None):
        yield absent
        return
    devices = 2 if TRAINING_ENGINES[training].shards_over_data else 1
    run_dir = place.scratch / "run"
    settings = [
        f"actor.engine={training.name}",
        f"rollout.engine={rollout}",
        f"trainer.devices={devices}",
        f"trainer.run_dir={run_dir}",
        *(["trainer.device=cpu"] if _gpus() < devices else []),
        *_SETTINGS,
    ]
    # Without RAY_ADDRESS: other nodes do not see the run directory, which is temporary.
    place.doing(f"training {_STEPS} steps: {training.name}, {rollout}")
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "ppo", *settings],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    yield _finding(name, run_dir, done.returncode, done.stdout.splitlines(), devices)


def _gpus() -> int:
    """The GPUs that a run may use."""
    import torch

    return torch.cuda.device_count()


def _finding(name: str, run_dir: Path, status: int, output: Sequence[str], devices: int) -> Finding:
    ending, rows = read_ending(run_dir), rows_by_step(run_dir / METRICS_FILE)
    if status == 0 and len(rows) == _STEPS:
        seconds = rows[_STEPS].get("timing_s/step")
        saved = (run_dir / "checkpoints" / f"step_{_STEPS}" / "manifest.json").is_file()
        assert saved, f"{run_dir} has no checkpoint of step {_STEPS}"
        where = "1 device" if devices == 1 else f"{devices} devices on Ray"
        return ok(name, f"{_STEPS} steps on {where}, {seconds:.2f} s for the last one, and a checkpoint")
    said = ending.said if ending is not None else _message(output)
    found, remedy = split_remedy(said)
    return problem(
        name,
        f"a run of {_STEPS} steps exited with status {status}: {found.rstrip('.')}",
        remedy or f"The lines below '{name}' are the last ones that it printed.",
        [line for line in output if line.strip()][-_LAST_LINES:],
    )


def _message(output: Sequence[str]) -> str:
    """The error and its remedy in the output of a run that recorded no ending."""
    for number, line in enumerate(output):
        if line.startswith(REMEDY):
            return f"{output[number - 1]} {line}" if number else line
    return next((line for line in reversed(output) if line.strip()), "it printed nothing")


_PAIRS = (
    *((training, RolloutKind.transformers) for training in TRAINING_ENGINES),
    *((TrainingEngine.single, rollout) for rollout in RolloutKind if rollout is not RolloutKind.transformers),
)
"""Every engine once: training engines with the simplest rollout, other rollouts with the simplest training."""

CHECKS = tuple(
    Check(
        name_of(_WHAT, training, rollout),
        f"training with {training.name} and {rollout}",
        partial(_trained, training, rollout),
        seconds=_SECONDS,
        needs=("imports", "memory", *(("ray",) if TRAINING_ENGINES[training].shards_over_data else ())),
        is_micro_run=True,
    )
    for training, rollout in _PAIRS
)
