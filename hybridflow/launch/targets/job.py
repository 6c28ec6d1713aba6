"""A run as a target must know it: its command, its nodes and devices, and how long it takes to stop."""

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path

from hybridflow.config.placement import Device
from hybridflow.errors import Advice, ConfigError, Problems
from hybridflow.launch.compose.command_line import parse_command_line
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.overrides import Typed
from hybridflow.launch.compose.run_files import COMMAND, read_run_files
from hybridflow.launch.compose.trainers import RUN, is_run_file, known_command, shown_name
from hybridflow.launch.compose.yaml_text import yaml_text
from hybridflow.launch.rules.parallelism import parallelism_problems
from hybridflow.launch.targets.target import Target, TargetKind

_SPARE_SECONDS = 60
"""Time after `trainer.stop_seconds` for the exit of the run and for the requeue; Slurm sends its notice up to 60 s
early, never late."""

_LONGEST_NOTICE = 65535
"""The largest time of `sbatch --signal`, in seconds."""


@dataclass(frozen=True)
class Job:
    """A run as it is launched."""

    name: str
    words: tuple[str, ...]
    """The words after `hybridflow`."""

    files: tuple[Path, ...]
    """The run files among the words."""

    typed: Typed
    """All settings of the user, also those of the files."""

    trainer: str
    nodes: int
    devices: int
    """Devices per node."""

    gpus: int
    """GPUs per node: the devices, unless the run uses CPUs."""

    start_seconds: int
    stop_seconds: int
    run_dir: str
    """As the user wrote it."""

    is_elastic: bool
    """Whether `trainer.elastic` lets the run continue on fewer devices."""

    @property
    def command(self) -> str:
        """The command line that starts the run, and resumes it."""
        return shlex.join(["hybridflow", *self.words])

    @property
    def notice_seconds(self) -> int:
        """How long before the end of the job the run needs a notice."""
        return self.stop_seconds + _SPARE_SECONDS

    @property
    def ray_devices(self) -> str:
        """The option of `ray start` for the devices of a node."""
        return f"--num-gpus={self.gpus}" if self.gpus else f"--num-cpus={self.devices}"

    @property
    def wait_words(self) -> str:
        """The options of `hybridflow.launch.nodes` for the time to wait and the GPUs of a node."""
        return f"--seconds {self.start_seconds}" + (f" --gpus {self.gpus}" if self.gpus else "")

    @property
    def run_file(self) -> str:
        """One run file with all settings of the user."""
        settings = {setting.key: setting.value for setting in self.typed.settings}
        return yaml_text({COMMAND: shown_name(self.trainer), **self.typed.groups, **settings})


def read_job(words: Sequence[str], target: Target) -> Job:
    """The job of a training command, checked as far as that needs neither its devices, its models nor its data."""
    command, rest = _command_of(words)
    known = None if command == RUN else known_command(command)
    flags = parse_command_line(rest, program="hybridflow launch", command=known)
    typed = flags.typed()
    composed = compose_run(typed, config_name=flags.config_name)
    config = composed.config
    Problems().check([parallelism_problems], config)
    _check_resume(config.trainer.resume, target)
    uses_gpus = config.trainer.device is not Device.cpu
    if not config.trainer.devices and target.kind not in (TargetKind.local, TargetKind.ray):
        raise ConfigError(
            f"trainer.devices=auto takes the devices that are there, but {target.kind.value} must reserve them.",
            remedy="Set trainer.devices to the number of devices per node.",
            key="trainer.devices",
        )
    written = composed.flat()["trainer.run_dir"]
    job = Job(
        name=target.name or _name_of(config.trainer.experiment),
        words=(command, *rest),
        files=tuple(flags.files),
        typed=typed,
        trainer=composed.trainer,
        nodes=config.trainer.nodes,
        devices=config.trainer.devices,
        gpus=config.trainer.devices if uses_gpus else 0,
        start_seconds=math.ceil(config.trainer.start_timeout_seconds),
        stop_seconds=math.ceil(config.trainer.stop_seconds),
        run_dir=str(written) if written else str(Path("runs", config.trainer.experiment)),
        is_elastic=config.trainer.elastic.min_devices is not None,
    )
    _check_notice(job, target)
    _check_run_dir(job, target)
    _check_files(job, target)
    _check_secrets(target)
    return job


def launch_advice(job: Job, target: Target) -> Iterator[Advice]:
    """Warnings: settings that have no effect where the job runs, and what a run on this machine needs."""
    if job.is_elastic and target.kind in (TargetKind.slurm, TargetKind.skypilot):
        yield Advice(
            f"trainer.elastic has no effect on {target.kind.value}: when a node is lost, the job ends and starts again"
            " with as many nodes.",
            "Leave it out, or use a Ray cluster or kuberay.",
        )
    if target.kind is TargetKind.local and job.nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        yield Advice(
            f"trainer.nodes={job.nodes} needs a running Ray cluster, but RAY_ADDRESS is not set.",
            "Start Ray on the nodes (ray start), and set RAY_ADDRESS to the address of its head, such as head:6379.",
        )


def _command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The training command, and the words after it; by default the one that a run file names, or ppo."""
    if words and "=" not in words[0] and not is_run_file(words[0]):
        if words[0] != RUN:
            known_command(words[0])
        return words[0], [*words[1:]]
    files = [Path(word) for word in words if is_run_file(word)]
    is_named = bool(files) and read_run_files(files, Problems(collects=True)).command is not None
    return (RUN if is_named else "ppo"), [*words]


def _name_of(experiment: str) -> str:
    """An experiment as the name of a job, which on Kubernetes has only lowercase letters, digits and dashes."""
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in experiment.lower())
    return f"hybridflow-{name}"[:47].rstrip("-")


def _check_resume(resume: str, target: Target) -> None:
    """Raises `ConfigError` if a job that starts again would not continue its run."""
    if resume == "auto" or not (target.most_requeues or target.kind is TargetKind.skypilot):
        return
    raise ConfigError(
        f"trainer.resume={resume}: when the job starts again, it would not continue from its own checkpoint.",
        remedy="Use trainer.resume=auto with a new trainer.experiment"
        + (", or --requeues 0." if target.kind is not TargetKind.skypilot else "."),
        key="trainer.resume",
    )


def _check_notice(job: Job, target: Target) -> None:
    """Raises `ConfigError` if there is no time for the notice before the end of the job."""
    if target.kind is TargetKind.slurm and job.notice_seconds > _LONGEST_NOTICE:
        raise ConfigError(
            f"trainer.stop_seconds={job.stop_seconds} is above the {_LONGEST_NOTICE - _SPARE_SECONDS} seconds for which"
            " Slurm can send its notice before the end of a job.",
            remedy="Set the time that one step and a checkpoint take.",
            key="trainer.stop_seconds",
        )
    if target.seconds is not None and target.seconds <= job.notice_seconds:
        raise ConfigError(
            f"--time={target.time} leaves the run no time: it stops {job.notice_seconds} seconds before the end of the"
            f" job (trainer.stop_seconds={job.stop_seconds} and {_SPARE_SECONDS} seconds).",
            remedy="Give a longer --time, or a shorter trainer.stop_seconds.",
        )


def _check_run_dir(job: Job, target: Target) -> None:
    """Raises `ConfigError` if the run's directory would be lost with the machines or containers of the job."""
    if target.kind is TargetKind.local:
        return
    if target.kind is TargetKind.slurm:
        _check_container(job, target)
        return
    key, on = f"trainer.run_dir={job.run_dir}", f"on {target.kind.value}"
    if not job.run_dir.startswith("/"):
        raise ConfigError(
            f"{key} is relative, and {on} the directory of the job is deleted with it.",
            remedy="Give an absolute trainer.run_dir on storage that all nodes share.",
            key="trainer.run_dir",
        )
    kept = [mount for mount in target.mount if target.kind is not TargetKind.skypilot or "://" in mount]
    is_kept = any(Path(normpath(job.run_dir)).is_relative_to(normpath(directory_of(mount, target))) for mount in kept)
    if is_kept and target.kind is TargetKind.skypilot and job.nodes > 1:
        raise ConfigError(
            f"{key} is in a bucket, but several nodes need a shared file system: in a bucket, a node sees files of"
            " others late, or files cannot be appended to.",
            remedy="Mount a volume that all nodes can write to (--line 'volumes: {/shared: VOLUME}', of sky volumes"
            " apply), set trainer.run_dir below it, and copy checkpoints to the bucket with trainer.checkpoint_url.",
            key="trainer.run_dir",
        )
    if target.kind is not TargetKind.ray and not is_kept and not target.line:
        raise ConfigError(
            f"{key} is not below a mounted directory, and {on} it would be lost with the machines of the job.",
            remedy=f"Mount storage that all nodes share, such as --mount"
            f" {'CLAIM:/shared' if target.kind is TargetKind.kuberay else 's3://BUCKET:/shared'}, and set"
            " trainer.run_dir below it.",
            key="trainer.run_dir",
        )


def _check_container(job: Job, target: Target) -> None:
    """Raises `ConfigError` if a container hides the run's directory or the node's /tmp."""
    if target.image is None:
        return
    directories = [Path(directory_of(mount, target)) for mount in target.mount]
    if target.uses_pyxis and Path("/tmp") in directories:
        raise ConfigError(
            "--mount gives the container another /tmp, but the processes of a node meet in the node's /tmp.",
            remedy="Mount the directory elsewhere.",
        )
    visible = [*directories, *([Path.cwd()] if target.directory is None else [])]
    if target.uses_pyxis and target.directory is None and re.search("[,:]", str(Path.cwd())):
        raise ConfigError(
            f"The container gets this directory, {Path.cwd()}, but a path with a comma or colon cannot be mounted.",
            remedy="Start the command in another directory, or give --directory, one of the container.",
        )
    if not target.uses_pyxis:  # Apptainer mounts these
        visible += [Path.cwd(), Path.home()]
    run_dir = Path(target.directory or Path.cwd(), job.run_dir)
    if not any(run_dir.is_relative_to(directory) for directory in visible):
        raise ConfigError(
            f"trainer.run_dir={job.run_dir} is not in a mounted directory, so that it would be lost with the container"
            f" ({run_dir}).",
            remedy="Mount storage that all nodes share, such as --mount /shared:/shared, and set trainer.run_dir below"
            " it.",
            key="trainer.run_dir",
        )


def _check_secrets(target: Target) -> None:
    """Raises `ConfigError` for a secret that the environment does not have; Kubernetes has its own."""
    if target.kind is TargetKind.kuberay:
        return
    for name in target.secret:
        if name not in os.environ:
            raise ConfigError(
                f"This environment has no variable {name}, which --secret names.",
                remedy=f"Run 'export {name}=...' first.",
            )


def _check_files(job: Job, target: Target) -> None:
    """Raises `ConfigError` for run files that are not copied with the working directory."""
    if target.kind not in (TargetKind.ray, TargetKind.skypilot):
        return
    for file in job.files:
        if not file.absolute().resolve().is_relative_to(Path.cwd().resolve()) or file.is_absolute():
            raise ConfigError(
                f"{file} is not in the working directory, which {target.kind.value} copies for the job.",
                remedy="Start in a directory that contains the run file, and give its relative path.",
            )


def directory_of(mount: str, target: Target) -> str:
    """The directory of a mount; the source may have colons of its own, as in s3://bucket."""
    return mount.rpartition(":")[2] if target.kind is not TargetKind.slurm else mount.split(":")[1]
