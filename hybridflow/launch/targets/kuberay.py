"""A run as a RayJob of KubeRay. Its settings and its start script are annotations, which the head mounts as files."""

import shlex
from importlib.metadata import version

from hybridflow.launch.targets.job import Job, directory_of
from hybridflow.launch.targets.target import Target
from hybridflow.launch.targets.texts import manifest_text, merged

_FILES = "/etc/hybridflow"
_PROCESS = "/tmp/hybridflow.pid"
_KEEP_SECONDS = 3600

_NOTICE = f"""pid=$(cat {_PROCESS}) && kill -USR1 "$pid" && while kill -0 "$pid"; do sleep 1; done"""
"""The command that Kubernetes runs in a pod that it is about to end; in the head's, the run saves a checkpoint."""


def rayjob_manifest(job: Job, target: Target) -> str:
    """The RayJob. Node 0 is the head, whose pod has GPUs too and runs the driver.

    If the run ends with an error or its head is lost, KubeRay starts another cluster, at most `requeues` times.
    """
    deadline = {} if target.seconds is None else {"activeDeadlineSeconds": target.seconds}
    cores = {} if job.gpus else {"num-cpus": str(job.devices)}  # of a run on CPUs, each of which is a device
    workers = {"groupName": "workers", **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes - 1)}
    rayjob = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": f"bash {_FILES}/start.sh",
            "backoffLimit": target.most_requeues,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEEP_SECONDS,
            **deadline,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},  # KubeRay makes a token and gives it to all pods
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0", **cores},
                    "template": _pod(job, target, is_head=True),
                },
                "workerGroupSpecs": [
                    {**workers, "rayStartParams": cores, "template": _pod(job, target, is_head=False)}
                    for _ in range(min(1, job.nodes - 1))
                ],
            },
        },
    }
    return manifest_text(merged(rayjob, target.merged))


def _start(job: Job, target: Target) -> str:
    """The script that becomes the driver."""
    lines = [
        "set -e",
        *([] if target.directory is None else [f"cd {shlex.quote(target.directory)}"]),
        *target.setup,
        f"python -m hybridflow.launch.nodes --count {job.nodes} {job.wait_words}",
        f"echo $$ > {_PROCESS}",
        f"exec hybridflow run {_FILES}/run.yaml",
    ]
    return "".join(f"{line}\n" for line in lines)


def _pod(job: Job, target: Target, *, is_head: bool) -> dict[str, object]:
    annotations = {"hybridflow/run.yaml": job.run_file, "hybridflow/start.sh": _start(job, target)} if is_head else {}
    amounts = {"cpu": target.cpus, "memory": None if target.gigabytes is None else f"{target.gigabytes}Gi"}
    amounts |= {"nvidia.com/gpu": job.gpus or None}
    resources = {name: str(amount) for name, amount in amounts.items() if amount is not None}
    claims = list(dict.fromkeys(mount.rpartition(":")[0] for mount in target.mount))
    volumes: list[dict[str, object]] = [
        {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    mounts = [
        {"name": f"mount-{claims.index(mount.rpartition(':')[0])}", "mountPath": directory_of(mount, target)}
        for mount in target.mount
    ]
    # Ray's object store, of which a container has 64 MiB by default.
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    container: dict[str, object] = {
        "name": "ray-head" if is_head else "ray-worker",
        "image": target.image,
        "env": [{"name": name, "value": _literal(value)} for name, value in target.variables.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in target.secret],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": mounts,
    }
    if is_head:
        volumes.append({"name": "run", "downwardAPI": {"items": [_file(name) for name in annotations]}})
        mounts.append({"name": "run", "mountPath": _FILES})
        container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", _NOTICE]}}}
    containers = [{name: value for name, value in container.items() if value}]
    spec = {"terminationGracePeriodSeconds": job.notice_seconds, "containers": containers, "volumes": volumes}
    return {"metadata": {"annotations": annotations}, "spec": spec} if is_head else {"spec": spec}


def _literal(value: str) -> str:
    """A value in which Kubernetes expands no `$(NAME)`."""
    return value.replace("$", "$$")


def _file(annotation: str) -> dict[str, object]:
    """An annotation as a file."""
    return {"path": annotation.rpartition("/")[2], "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
