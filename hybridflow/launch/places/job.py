"""A run as a place must know it: its command, its nodes and devices, and how long it takes to stop."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hybridflow.config.placement import Device
from hybridflow.errors import ConfigError, Faults
from hybridflow.launch.compose.command_line import parse_command_line
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.overrides import Typed
from hybridflow.launch.compose.run_files import COMMAND, read_run_files
from hybridflow.launch.compose.trainers import RUN, is_run_file, known_command, shown_name
from hybridflow.launch.places.place import Place, PlaceKind
from hybridflow.launch.rules.elastic import bound_problems
from hybridflow.launch.rules.parallelism import parallelism_problems

_SPARE_SECONDS = 60
"""Time after `trainer.stop_seconds` for the exit of the run and for the requeue; Slurm sends its notice up to 60 s
early, never late."""


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
        return yaml.safe_dump({COMMAND: shown_name(self.trainer), **self.typed.groups, **settings}, sort_keys=False)


def read_job(words: Sequence[str], place: Place) -> Job:
    """The job of a training command, checked as far as that needs neither its devices, its models nor its data."""
    command, rest = _command_of(words)
    known = None if command == RUN else known_command(command)
    flags = parse_command_line(rest, program="hybridflow launch", command=known)
    typed = flags.typed()
    composed = compose_run(typed, config_name=flags.config_name)
    config = composed.config
    Faults().check([parallelism_problems, bound_problems], config)
    _check_resume(config.trainer.resume, place)
    uses_gpus = config.trainer.device is not Device.cpu
    if not config.trainer.devices and place.kind not in (PlaceKind.local, PlaceKind.ray):
        raise ConfigError(
            f"trainer.devices=auto takes the devices that are there, but {place.kind.value} must reserve them.",
            remedy="Set trainer.devices to the number of devices per node.",
            key="trainer.devices",
        )
    written = composed.flat()["trainer.run_dir"]
    job = Job(
        name=place.name or _name_of(config.trainer.experiment),
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
    )
    _check_run_dir(job, place)
    _check_files(job, place)
    return job


def _command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The training command, and the words after it; by default the one that a run file names, or ppo."""
    if words and "=" not in words[0] and not is_run_file(words[0]):
        if words[0] != RUN:
            known_command(words[0])
        return words[0], [*words[1:]]
    files = [Path(word) for word in words if is_run_file(word)]
    is_named = bool(files) and read_run_files(files, Faults(collects=True)).command is not None
    return (RUN if is_named else "ppo"), [*words]


def _name_of(experiment: str) -> str:
    """An experiment as the name of a job, which on Kubernetes has only lowercase letters, digits and dashes."""
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in experiment.lower())
    return f"hybridflow-{name}"[:47].rstrip("-")


def _check_resume(resume: str, place: Place) -> None:
    """Raises `ConfigError` if a job that starts again would not continue its run."""
    if resume == "auto" or not (place.most_requeues or place.kind is PlaceKind.skypilot):
        return
    raise ConfigError(
        f"trainer.resume={resume}: when the job starts again, it would not continue from its own checkpoint.",
        remedy="Use trainer.resume=auto with a new trainer.experiment"
        + (", or --requeues 0." if place.kind is not PlaceKind.skypilot else "."),
        key="trainer.resume",
    )


def _check_run_dir(job: Job, place: Place) -> None:
    """Raises `ConfigError` if the run's directory would be lost with the machines of the job."""
    if place.kind in (PlaceKind.local, PlaceKind.slurm):
        return
    key, on = f"trainer.run_dir={job.run_dir}", f"on {place.kind.value}"
    if not job.run_dir.startswith("/"):
        raise ConfigError(
            f"{key} is relative, and {on} the directory of the job is deleted with it.",
            remedy="Give an absolute trainer.run_dir on storage that all nodes share.",
            key="trainer.run_dir",
        )
    places = [directory_of(mount, place) for mount in place.mount]
    is_kept = any(Path(job.run_dir).is_relative_to(directory) for directory in places)
    if place.kind is not PlaceKind.ray and not is_kept and not place.line:
        raise ConfigError(
            f"{key} is not below a mounted directory, and {on} it would be lost with the machines of the job.",
            remedy=f"Mount storage that all nodes share, such as --mount"
            f" {'CLAIM:/shared' if place.kind is PlaceKind.kuberay else 's3://BUCKET:/shared'}, and set"
            " trainer.run_dir below it.",
            key="trainer.run_dir",
        )


def _check_files(job: Job, place: Place) -> None:
    """Raises `ConfigError` for run files that are not copied with the working directory."""
    if place.kind not in (PlaceKind.ray, PlaceKind.skypilot):
        return
    for file in job.files:
        if not file.absolute().resolve().is_relative_to(Path.cwd().resolve()) or file.is_absolute():
            raise ConfigError(
                f"{file} is not in the working directory, which {place.kind.value} copies for the job.",
                remedy="Start in a directory that contains the run file, and give its relative path.",
            )


def directory_of(mount: str, place: Place) -> str:
    """The directory of a mount; the source may have colons of its own, as in s3://bucket."""
    return mount.rpartition(":")[2] if place.kind is not PlaceKind.slurm else mount.split(":")[1]
