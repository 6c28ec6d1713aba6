"""Episodes of a program that knows nothing of hybridflow: it talks to an OpenAI-style endpoint, and prints a reward."""

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.environments.endpoint import Endpoint
from hybridflow.environments.interface import EpisodeOver, Finished, Model
from hybridflow.errors import ConfigError, EpisodeError

_SHOWN_CHARACTERS = 300
_KEPT_CHARACTERS = 2000


class RewardSource(StrEnum):
    """The source of a program's reward."""

    last_line = "last_line"
    exit_status = "exit_status"
    none = "none"


async def play_program(
    model: Model, row: Mapping[str, object], seed: int, *, program: str, reward: str = RewardSource.last_line
) -> Finished:
    """Runs a program for one episode; returns its reward, information, and the end of its standard error.

    It finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, and reads the row of the data from its standard input,
    as one line of JSON that also has `seed`. With `last_line`, the last line that it prints is the reward: a number, or
    an object with `reward` and further numbers. With `exit_status`, it is 1 for status 0, and 0 for status 1; with
    `none`, it is 0, for runs with other reward functions. Raises `EpisodeError` if it fails.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # that of this process
    # Not pipes, which processes that outlive the program would keep open.
    with Endpoint(model) as endpoint, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=variables | endpoint.variables,
        )
        try:
            await process.communicate(json.dumps({**row, "seed": seed}).encode() + b"\n")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        output, errors = _written(stdout), _written(stderr).decode(errors="replace").strip()
    status = process.returncode
    if endpoint.over is not None and status:
        raise EpisodeOver(endpoint.over)
    if status and not (status == 1 and reward == RewardSource.exit_status):
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        said = errors[-_SHOWN_CHARACTERS:] or "it wrote nothing to its standard error."
        raise EpisodeError(f"its program {how}: {said}", remedy="Let it exit with status 0.")
    if not model.num_replies:
        raise EpisodeError(
            "its program ended without a reply of the model.",
            remedy="Let it send its requests to OPENAI_BASE_URL, with the key OPENAI_API_KEY.",
        )
    score, info = float(reward == RewardSource.exit_status and status == 0), {}
    if reward == RewardSource.last_line:
        score, info = _printed_reward(output)
    return Finished([*[0.0] * (model.num_replies - 1), score], info, stderr=errors[-_KEPT_CHARACTERS:])


def _written(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def check_program(config: EnvironmentSettings) -> None:
    """Raises `ConfigError` for a program that cannot be started, and for settings that it does not have."""
    key = f"environment.program={config.program}"
    try:
        words = shlex.split(str(config.program))
    except ValueError as error:
        raise ConfigError(f"{key} is not a command: {error}.", remedy="Quote it as in a shell.") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"{key}: there is no program '{words[0] if words else ''}'.",
            remedy="Name a program in PATH, or its path; it is not run by a shell.",
        )
    for word in words[1:]:
        if word.endswith((".py", ".sh")) and not Path(word).is_file():
            raise ConfigError(f"{key}: there is no file {word}.", remedy="Name a file that exists on every node.")
    if config.processes == 0:
        raise ConfigError(f"{key} needs environment.processes=1 or more.", remedy="Leave environment.processes out.")
    allowed = ", ".join(RewardSource)
    for name, value in config.settings.items():
        if name != "reward" or value not in [*RewardSource]:
            raise ConfigError(
                f"{key} has no setting {name}={value}.", remedy=f"Use environment.settings.reward={allowed}."
            )


def _printed_reward(output: bytes) -> tuple[float, dict]:
    """The reward in the last line that is not empty, and further information in it."""
    lines = output.decode(errors="replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    info = {name: value for name, value in found.items() if name != "reward"} if isinstance(found, dict) else {}
    reward = found.get("reward") if isinstance(found, dict) else found
    if isinstance(reward, int | float) and abs(reward) <= LARGEST_SCORE:
        return float(reward), info
    raise EpisodeError(
        f"the last line of its program is not a reward between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}:"
        f" {line[:_SHOWN_CHARACTERS]!r}.",
        remedy='Let it print a number, or {"reward": number}, last, or set environment.settings.reward=exit_status.',
    )
