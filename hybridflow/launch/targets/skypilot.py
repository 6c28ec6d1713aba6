"""A run as a task of SkyPilot, which `sky jobs launch` recovers after the preemption of its machines."""

import secrets
from importlib.resources import files

from hybridflow.launch.targets.job import Job, directory_of
from hybridflow.launch.targets.target import Target
from hybridflow.launch.targets.texts import manifest_text, merged, variable
from hybridflow.process import STATUS_AFTER_NOTICE

_HERE = "."
_OF_SHELL = ("source ", ". ", "export ", "eval ", "module ", "conda activate", "mamba activate", "ulimit ")
"""Beginnings of lines that only change their shell. SkyPilot runs `setup` and `run` in shells of their own."""


def task_text(job: Job, target: Target) -> str:
    """The task as YAML. Several nodes start a Ray of their own, next to SkyPilot's, with a token made for the job."""
    wanted = {
        "accelerators": f"{target.gpu}:{job.gpus}" if job.gpus else None,
        "cpus": None if target.cpus is None else f"{target.cpus}+",
        "memory": None if target.gigabytes is None else f"{target.gigabytes}+",
        "image_id": None if target.image is None else f"docker:{target.image}",
    }
    resources: dict[str, object] = {name: value for name, value in wanted.items() if value is not None}
    resources["job_recovery"] = {"recover_on_exit_codes": [STATUS_AFTER_NOTICE]}
    task: dict[str, object] = {
        "name": job.name,
        "workdir": _HERE,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": target.variables,
        "secrets": dict.fromkeys(target.secret) | ({"RAY_AUTH_TOKEN": secrets.token_hex(32)} if job.nodes > 1 else {}),
        "file_mounts": {directory_of(mount, target): _mounted(mount.rpartition(":")[0]) for mount in target.mount},
        "setup": "".join(f"{line}\n" for line in target.setup),
        "run": "".join(f"{line}\n" for line in target.setup if line.startswith(_OF_SHELL)) + _run(job),
    }
    return manifest_text(merged({name: value for name, value in task.items() if value}, target.merged))


def _mounted(source: str) -> object:
    """A directory that is copied, or a bucket with a cache, since only with one can files be appended to."""
    return {"source": source, "mode": "MOUNT_CACHED"} if "://" in source else source


def _run(job: Job) -> str:
    if job.nodes == 1:
        return f"{job.command}\n"
    values = [variable("run", job.command), f"devices=({job.ray_devices})", f"wait_for=({job.wait_words})"]
    return "\n".join([*values, (files("hybridflow") / "assets" / "skypilot.sh").read_text()])
