"""A run as a task of SkyPilot, which `sky jobs launch` recovers after the preemption of its machines."""

import secrets
from importlib.resources import files

from hybridflow.launch.places.job import Job, directory_of
from hybridflow.launch.places.place import Place
from hybridflow.launch.places.texts import manifest_text, merged, variable
from hybridflow.process import STATUS_AFTER_NOTICE

_HERE = "."


def task_text(job: Job, place: Place) -> str:
    """The task as YAML. Several nodes start a Ray of their own, next to SkyPilot's, with a token made for the job."""
    wanted = {
        "accelerators": f"{place.gpu}:{job.gpus}" if job.gpus else None,
        "cpus": None if place.cpus is None else f"{place.cpus}+",
        "memory": None if place.gigabytes is None else f"{place.gigabytes}+",
        "image_id": None if place.image is None else f"docker:{place.image}",
    }
    resources: dict[str, object] = {name: value for name, value in wanted.items() if value is not None}
    resources["job_recovery"] = {"recover_on_exit_codes": [STATUS_AFTER_NOTICE]}
    task: dict[str, object] = {
        "name": job.name,
        "workdir": _HERE,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": place.variables,
        "secrets": dict.fromkeys(place.secret) | ({"RAY_AUTH_TOKEN": secrets.token_hex(32)} if job.nodes > 1 else {}),
        "file_mounts": {directory_of(mount, place): _mounted(mount.rpartition(":")[0]) for mount in place.mount},
        "setup": "".join(f"{line}\n" for line in place.setup),
        "run": _run(job),
    }
    return manifest_text(merged({name: value for name, value in task.items() if value}, place.merged))


def _mounted(source: str) -> object:
    """A directory that is copied, or a bucket with a cache, since only with one can files be appended to."""
    return {"source": source, "mode": "MOUNT_CACHED"} if "://" in source else source


def _run(job: Job) -> str:
    if job.nodes == 1:
        return f"{job.command}\n"
    values = [variable("run", job.command), f"devices=({job.ray_devices})", f"wait_for=({job.wait_words})"]
    return "\n".join([*values, (files("hybridflow") / "assets" / "skypilot.sh").read_text()])
