"""A run as a job of a running Ray cluster: `ray job submit`."""

import json
import os
from pathlib import Path

from hybridflow.errors import ConfigError
from hybridflow.launch.targets.job import Job
from hybridflow.launch.targets.target import Target
from hybridflow.launch.targets.texts import merged

_ADDRESS = "RAY_API_SERVER_ADDRESS"
_SPARE_SECONDS = 5


def submit_words(job: Job, target: Target) -> list[str]:
    """The command that copies the working directory to the cluster and starts the driver there.

    `ray job stop` then gives the run the time to save a checkpoint; Ray's default is 3 seconds.
    """
    address = target.address or os.environ.get(_ADDRESS)
    if address is None:
        raise ConfigError(
            f"There is no address of a Ray cluster: neither --address nor {_ADDRESS} is set.",
            remedy="Give the address of its job server, such as --address http://head:8265.",
        )
    stop = {"RAY_JOB_STOP_WAIT_TIME_S": str(job.stop_seconds + _SPARE_SECONDS)}
    environment: dict[str, object] = {"env_vars": {**stop, **target.variables}}
    if target.requirements is not None:
        if "pip" in target.merged:
            raise ConfigError(
                "--requirements and pip in --line both give the packages of the job.",
                remedy="Leave out one of them.",
            )
        environment["pip"] = _required(Path(target.requirements))
    described = json.dumps(merged(environment, target.merged))
    options = [f"--address={address}", "--working-dir=.", f"--runtime-env-json={described}", "--no-wait"]
    return ["ray", "job", "submit", *options, "--", "hybridflow", *job.words]


def _required(file: Path) -> list[str]:
    """The lines of a requirements file."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requirements {file} cannot be read: {error}.", remedy="Give an existing file.") from error
    return [line for line in lines if line and not line.startswith("#")]
