"""The submission of a job to each target: the text that it is given, and the program that takes it."""

import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ConfigError, ResourceError
from hybridflow.launch.targets.job import Job
from hybridflow.launch.targets.kuberay import rayjob_manifest
from hybridflow.launch.targets.ray_job import submit_words
from hybridflow.launch.targets.skypilot import task_text
from hybridflow.launch.targets.slurm import sbatch_script
from hybridflow.launch.targets.target import Target, TargetKind

_INSTALLED_BY = {
    "sbatch": "Submit from a login node of the cluster, on which Slurm is installed.",
    "kubectl": "Install kubectl, and give it access to the cluster.",
    "sky": "Install SkyPilot (pip install skypilot).",
    "ray": "Install Ray with its job client (pip install 'ray[default]').",
}


@dataclass(frozen=True)
class Submission:
    """A command, and the text of the file that is its last argument, if it takes one."""

    command: tuple[str, ...]
    text: str = ""
    suffix: str = ""

    @property
    def shown(self) -> str:
        """The text that `--dry-run` prints: the file or, without one, the command."""
        return self.text or f"{shlex.join(self.command)}\n"

    def submit(self) -> None:
        """Runs the command. Raises `ResourceError` if it is not installed or fails."""
        if not self.text:
            _run(self.command)
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"hybridflow{self.suffix}")
            file.write_text(self.text, encoding="utf-8")
            _run([*self.command, str(file)])


def submission_of(job: Job, target: Target) -> Submission:
    """The submission of a job to a target."""
    kind = target.kind
    if kind is TargetKind.slurm:
        if target.mount:
            _check_given(
                target, "image", "the image of a container, or leave --mount out: without one, nodes see their disks"
            )
        return Submission(("sbatch",), sbatch_script(job, target), ".sh")
    if kind is TargetKind.kuberay:
        _check_given(target, "image", "the image of the pods, with hybridflow installed")
        return Submission(("kubectl", "create", "-f"), rayjob_manifest(job, target), ".yaml")
    if kind is TargetKind.skypilot:
        if job.gpus:
            _check_given(target, "gpu", "the kind of GPU, such as H100; for a run on CPUs, set trainer.device=cpu")
        secrets = [
            word for name in target.secret for word in ("--secret", name)
        ]  # which sky reads from this environment
        return Submission(("sky", "jobs", "launch", "--yes", *secrets), task_text(job, target), ".yaml")
    if kind is TargetKind.ray:
        return Submission(tuple(submit_words(job, target)))
    return Submission(("hybridflow", *job.words))


def _check_given(target: Target, name: str, what: str) -> None:
    if not vars(target)[name]:
        raise ConfigError(f"--{name} is missing for {target.kind.value}.", remedy=f"Give {what}.")


def _run(command: Sequence[str]) -> None:
    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise ResourceError(
            f"There is no program '{command[0]}' on this machine.",
            remedy=f"{_INSTALLED_BY[command[0]]} With --dry-run, nothing is submitted.",
        ) from error
    if status:
        raise ResourceError(
            f"Nothing was submitted: {shlex.join(command[:2])} ended with exit status {status}.",
            remedy=f"Read above why '{command[0]}' failed. With --dry-run, what it was given is printed.",
        )
