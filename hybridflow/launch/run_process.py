"""A command as a process on a node of a cluster. Its actor imports this file, so it imports no large library."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.storage_token import TOKEN_FILE, read_back
from hybridflow.errors import ResourceError
from hybridflow.process import ends_with

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class RunCommand:
    """The words of a `hybridflow` command, and the directories in which its node must find what is expected."""

    words: tuple[str, ...]
    working_directory: Path
    output: Path
    """The file for what it prints."""

    meeting: Path
    """A directory that holds `token`, on the storage that all nodes must share."""

    token: str


class RunProcess:
    """The process of a command, on the node of its actor: `start`, then `status` until it has ended.

    The process ends if its actor does.
    """

    def __init__(self, command: RunCommand) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], devices_of_node: int) -> None:
        """Starts the process with these variables, those of the node, and its share of the node's threads.

        Raises `ResourceError` if the node does not see the directories of the command.
        """
        command = self._command
        self._check_directories()
        threads = {_THREADS: str(max(1, (os.cpu_count() or 1) // devices_of_node))}
        with command.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), *command.words],
                cwd=command.working_directory,
                env={**os.environ, **threads, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Sends SIGTERM to the process."""
        if self._process is not None:
            self._process.terminate()

    def _check_directories(self) -> None:
        command, node = self._command, socket.gethostname()
        share = "on storage that all nodes mount under the same path"
        if (unread := read_back(command.meeting / TOKEN_FILE, command.token)) is not None:
            directory = command.meeting.parent
            raise ResourceError(
                f"The node {node} does not see trainer.run_dir={directory} as this command does: {unread}.",
                remedy=f"Set trainer.run_dir to a directory {share}.",
            )
        if not command.working_directory.is_dir():
            raise ResourceError(
                f"The node {node} does not have the working directory of this command, {command.working_directory}.",
                remedy=f"Start the sweep in a directory {share}.",
            )


def main(arguments: Sequence[str]) -> None:
    """Becomes the `hybridflow` command of these words, after the id of the parent, with which the process ends."""
    parent, *words = arguments
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's processes block it
    if ends_with(int(parent)):
        os.execv(sys.executable, [sys.executable, "-m", "hybridflow", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
