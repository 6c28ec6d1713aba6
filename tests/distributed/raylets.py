"""A Ray cluster of two raylets that were started in other directories than the command, as the documentation says."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "several_nodes.md"
_ONE_SMALL_DEVICE = "ray start --num-cpus=1 --object-store-memory=100000000"


def page_commands() -> list[str]:
    """The shell commands of the page on several nodes, block by block."""
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


@dataclass
class TwoNodes:
    """Two raylets, a home directory with their token, and a directory that stands for the shared storage."""

    folder: Path
    address: str
    environment: Mapping[str, str]
    said: list[str] = field(default_factory=list)

    def sh(self, command: str, *, cwd: Path, timeout: float = 170.0, **environment: str) -> int:
        """Runs a command of the page in a directory; its exit status. What it said is the last of `said`."""
        text = command.replace("HEAD_ADDRESS:6379", self.address).replace("trainer.devices=8", "trainer.devices=1")
        done = subprocess.run(
            ["bash", "-euc", text], cwd=cwd, env=self.environment | environment, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.said.append(" ".join(done.stdout.split()))
        return done.returncode

    def raylet(self, *, of_head: bool) -> psutil.Process:
        """The raylet of the head or of the other node."""
        [found] = [
            process
            for process in _given(self.environment["RAY_TMPDIR"])
            if process.name() == "raylet" and ("--head" in process.cmdline()) == of_head
        ]
        return found


@contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Starts the cluster with the commands of the page, each in a directory of its own, and ends it."""
    # A short path: Ray makes Unix sockets below it, whose names have at most 107 bytes.
    sockets = Path(f"/tmp/hf{os.getpid()}")
    for name in ("home", "head", "other"):
        (folder / name).mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(sockets),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    token, head, other, *_ = page_commands()
    nodes = TwoNodes(folder, "", environment)
    try:
        head = head.replace("ray start", _ONE_SMALL_DEVICE).replace("6379", str(port))
        assert nodes.sh(token, cwd=folder) == 0, nodes.said
        assert nodes.sh(head, cwd=folder / "head") == 0, nodes.said
        printed = re.search(r"--address='([^']+)'", nodes.said[-1])
        assert printed is not None, nodes.said
        nodes.address = printed[1]
        assert nodes.sh(other.replace("ray start", _ONE_SMALL_DEVICE), cwd=folder / "other") == 0, nodes.said
        yield nodes
    finally:
        _end_all_below(sockets)
        shutil.rmtree(sockets, ignore_errors=True)


@contextmanager
def virtual_devices(count: int, folder: Path) -> Iterator[Mapping[str, str]]:
    """A Ray cluster with this many virtual devices, its token in a folder, and the environment of its commands."""
    sockets = Path(f"/tmp/hv{os.getpid()}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(sockets),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "HOME": str(folder),
    }
    resources = shlex.quote(json.dumps({"hybridflow_device": count}))
    start = f"ray start --head --port=0 --num-cpus=2 --object-store-memory=200000000 --resources={resources}"
    try:
        for command in ("ray get-auth-token --generate", start):
            done = subprocess.run(shlex.split(command), env=environment, check=True, capture_output=True, text=True)
        said = done.stdout
        printed = re.search(r"--address='([^']+)'", said)
        assert printed is not None, said
        yield environment | {"RAY_ADDRESS": printed[1]}
    finally:
        _end_all_below(sockets)
        shutil.rmtree(sockets, ignore_errors=True)


def _end_all_below(sockets: Path) -> None:
    """Kills the cluster's own processes: those that were given a directory below this one."""
    clusters = _given(str(sockets))
    for process in clusters:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(clusters, timeout=20)


def _given(sockets: str) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if f"{sockets}/" in shlex.join(process.info["cmdline"] or [])]
