"""A process that saves checkpoints and may be killed while it does.

As a script it reads one request a line (run directory, steps, where to die), lets a forked child save those steps, and
answers with the child's exit status: a hundred deaths cost one start of Python.
"""

import json
import os
import sys
from pathlib import Path

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.kill_points import VARIABLE
from hybridflow.elastic.manifest import Parts
from hybridflow.elastic.retention import Retention
from hybridflow.parallel.file_records import files_below, record_files

PART_BYTES = 4096


def contents(step: int) -> bytes:
    """What the part of a step must hold."""
    return bytes([step]) * PART_BYTES


def written_by(directory: Path, *roles: str) -> Parts:
    """Everything below the directories of these roles, as their workers would record it."""
    names = {role: [name for name in files_below(directory) if name.startswith(f"{role}/")] for role in roles}
    return {role: record_files(directory, files) for role, files in names.items()}


def save(store: CheckpointStore, step: int, **state: object) -> None:
    """One checkpoint with a part in a subdirectory, and a state that names the step."""

    def write(directory: Path) -> Parts:
        (directory / "actor").mkdir()
        (directory / "actor" / "weights.bin").write_bytes(contents(step))
        return written_by(directory, "actor")

    store.save(step, write, {"step": step, "loss": 0.1 * step, **state})


def store_with(run_dir: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    """A store with checkpoints of these steps, of a run on four devices."""
    store = CheckpointStore(run_dir, keep=Retention(keep), world=4)
    for step in steps:
        save(store, step)
    return store


def main() -> None:
    """Serve requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ[VARIABLE] = request["kill_at"]
            for step in request["steps"]:
                save(CheckpointStore(Path(request["run_dir"]), keep=Retention(2)), step)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
