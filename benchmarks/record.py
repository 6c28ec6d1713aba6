"""Shared by the benchmarks: a command that reports in JSON, and a description of the machine in each result."""

import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow import __version__
from hybridflow.optional import version_of

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that runs this checkout with one thread, and more of them."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)} | more


def run_reporting(command: Sequence[str], timeout: float) -> dict[str, Any] | None:
    """The JSON of the command's last line; None, and its last words in the log, when it failed."""
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=timeout, check=True, cwd=HERE.parent
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        logger.error("exit status %d of %s\n%s", error.returncode, " ".join(command), error.stderr[-3000:])
    except subprocess.TimeoutExpired:
        logger.error("no end after %g s: %s", timeout, " ".join(command))
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Adds an object to such a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_record(path: Path, packages: Sequence[str], measured: dict[str, Any]) -> None:
    """Everything measured, with the machine and the versions of the installed packages it was measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load_after": os.getloadavg()},
        "versions": {"hybridflow": __version__}
        | {name: number for name in ("torch", *packages) if (number := version_of(name))},
        **measured,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
