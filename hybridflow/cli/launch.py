"""`hybridflow launch`: submits a run to a target, or prints what would be submitted."""

import argparse
import sys
from collections.abc import Callable

from rich.console import Console

from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals, run_command

_DESCRIPTION = """Submits a training command to a target: this machine, a Ray cluster, Slurm, Kubernetes (KubeRay) or
a cloud (SkyPilot). The job has trainer.nodes nodes with trainer.devices GPUs each. After a preemption, a
time limit or the loss of a node, it starts again and resumes from its last checkpoint.

A target file holds the settings of a target under the names of the options:
  target: slurm
  partition: gpu
  setup: [source .venv/bin/activate]"""
_EXAMPLES = """examples:
  hybridflow launch --on local grpo task=calculator
  hybridflow launch --on slurm --dry-run --partition gpu --time 12:00:00 run.yaml trainer.nodes=2 trainer.devices=8
  hybridflow launch --on cluster.yaml run.yaml        with a target file
  hybridflow launch --on ray --address http://head:8265 run.yaml trainer.run_dir=/shared/runs/first
  hybridflow launch --on kuberay --image me/image --mount claim:/shared run.yaml trainer.run_dir=/shared/runs/first
  hybridflow launch --on skypilot --gpu H100 --mount s3://bucket:/shared run.yaml trainer.run_dir=/shared/runs/first
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `launch` to the commands."""
    from hybridflow.launch.targets.target import OPTIONS, TargetKind

    summary = "submit a run to Slurm, Ray, Kubernetes or a cloud, or run it here"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    names = [f"--{name}" for name in ("on", "dry-run", *(option.name for option in OPTIONS))]
    parser.set_defaults(run=_run, options=names)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="COMMAND | FILE.yaml | key=value",
        help="a training command, run files and settings, as hybridflow takes them",
    )
    kinds = "|".join(kind.value for kind in TargetKind)
    parser.add_argument("--on", default="", metavar="TARGET", help=f"{kinds}, or a target file")
    parser.add_argument("--dry-run", action="store_true", help="print the script or manifest, and submit nothing")
    for option in OPTIONS:
        targets = ", ".join(kind.value for kind in option.metadata["kinds"])
        parser.add_argument(
            f"--{option.name}",
            action="append" if isinstance(option.default, tuple) else "store",
            metavar=option.metadata["form"],
            help=f"{option.metadata['about']} ({targets})",
        )


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with ended_by_signals():
        from hybridflow.launch.messages import say_warnings
        from hybridflow.launch.targets.job import launch_advice, read_job
        from hybridflow.launch.targets.submission import submission_of
        from hybridflow.launch.targets.target import OPTIONS, TargetKind, read_target

    if not arguments.on:
        raise ConfigError(
            "--on is required: it says where the run is launched.",
            remedy=f"Give one: --on {', '.join(kind.value for kind in TargetKind)}, or a target file.",
        )
    given = {option.name: vars(arguments)[option.name] for option in OPTIONS}
    target = read_target(arguments.on, {name: value for name, value in given.items() if value is not None})
    job = read_job(arguments.overrides, target)
    submission = submission_of(job, target)
    if not arguments.overrides:
        raise ConfigError(
            "There is nothing to launch: the command has no run.",
            remedy="Add a training command, run files or settings, such as grpo run.yaml trainer.nodes=2.",
        )
    say_warnings(console, [*launch_advice(job, target)])
    if arguments.dry_run:
        sys.stdout.write(submission.shown)
        return 0
    if target.kind is TargetKind.local:
        return run_command(job.words[1:], command=job.words[0])
    submission.submit()
    console.print(f"submitted  {job.name}  {job.command}", soft_wrap=True, markup=False)
    return 0
