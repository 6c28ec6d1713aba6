"""A run as a batch script of Slurm: `sbatch` on `assets/slurm.sh`, with the job's options and settings before it.

Slurm keeps the script as it is submitted, so the script contains the settings of the run files: a change of the files
does not change a job that waits or is requeued.
"""

import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from hybridflow.launch.targets.job import Job
from hybridflow.launch.targets.target import Target
from hybridflow.launch.targets.texts import variable


def sbatch_script(job: Job, target: Target) -> str:
    """The script: one task per node, on which the run starts Ray if it has several nodes."""
    header = "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job, target))])
    about = "# Written by hybridflow launch. Each start of the job, also after a requeue, resumes the run."
    values = "\n".join(_values(job, target))
    body = (files("hybridflow") / "assets" / "slurm.sh").read_text()
    return f"{header}\n\n{about}\n{values}\n\n{body}"


def _options(job: Job, target: Target) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if job.gpus:
        yield f"--gpus-per-node={f'{target.gpu}:' if target.gpu else ''}{job.gpus}"
    if target.cpus is None:  # Slurm's default is a single core
        yield "--exclusive"
    else:
        yield f"--cpus-per-task={target.cpus}"
    if target.memory or target.cpus is None:
        yield f"--mem={target.memory or 0}"
    for name in ("partition", "account", "time"):
        if value := vars(target)[name]:
            yield f"--{name}={value}"
    yield "--requeue" if target.most_requeues else "--no-requeue"
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{job.notice_seconds}"
    yield from (line.removeprefix("#SBATCH ") for line in target.line)


def _values(job: Job, target: Target) -> Iterator[str]:
    """The variables that the rest of the script reads."""
    directory = target.directory or str(Path.cwd())
    exports = [f"export {name}={shlex.quote(value)}" for name, value in target.variables.items()]
    exports += [f': "${{{name}:?is not in the environment of the job}}"' for name in target.secret]
    setup = "\n".join(["set -e", f"cd {shlex.quote(directory)}", *exports, *target.setup, "set +e"])
    container, inside = _container(target)
    yield variable("setup", setup)
    yield variable("run_file", job.run_file.rstrip() if job.files else "")
    yield variable("run", "" if job.files else job.command)
    yield f"devices=({job.ray_devices})"
    yield f"wait_for=({job.wait_words})"
    yield f"stop_seconds={job.stop_seconds}"
    yield f"most_requeues={target.most_requeues}"
    yield f"container=({shlex.join(container)})"
    yield f"inside=({shlex.join(inside)})"


def _container(target: Target) -> tuple[list[str], list[str]]:
    """Options of srun for a container (pyxis), and the command that runs a program in one (Apptainer)."""
    if target.image is None:
        return [], []
    if not target.uses_pyxis:
        binds = [word for mount in target.mount for word in ("--bind", mount)]
        return [], ["apptainer", "exec", "--nv", *binds, target.image]
    # Each step has a container of its own, whose /tmp is empty, but the driver needs the sockets of its node's Ray.
    own = ["/tmp:/tmp", *([f"{Path.cwd()}:{Path.cwd()}"] if target.directory is None else [])]
    return [f"--container-image={target.image}", f"--container-mounts={','.join([*own, *target.mount])}"], []
