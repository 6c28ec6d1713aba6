"""A Ray run under watch: who unpickles, who listens where, and whether a file that it writes is a pickle.

    python -m tests.attacks.unpickling [--steps 4] [--resumed] [SETTING...]

Every process of the run loads `watched/sitecustomize.py`. With `--resumed`, the same command then goes on from its
checkpoint to twice as many steps. The run is PPO on two FSDP ranks; settings on the command line are added to it.
"""

import argparse
import ipaddress
import os
import pickletools
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.architecture.untrusted import MAY_UNPICKLE
from tests.distributed.runs import small_run

ROOT = Path(__file__).parents[2]
RAY = ["trainer.backend=ray", "trainer.devices=2", "actor.engine=fsdp", "reward.processes=1"]


@dataclass
class Watched:
    """What was seen of a run."""

    callers: Counter[str] = field(default_factory=Counter)
    """Number of processes in which each caller, given as `file:function`, read a pickle."""

    listeners: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Most ports on which processes of one name listened at one address at the same time."""

    files: int = 0
    pickles: list[Path] = field(default_factory=list)
    """Files of the run directory: how many, and those that are pickles."""

    def ours(self) -> set[str]:
        """Our own files that read pickles."""
        return {file for file in (caller.partition(":")[0] for caller in self.callers) if file.startswith("hybridflow")}

    def problems(self) -> list[str]:
        """What must not be."""
        found = [f"{file} unpickles" for file in sorted(self.ours() - MAY_UNPICKLE.keys())]
        for name, address in self.listeners:
            if not ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback:
                found.append(f"{name} listens at {address}")
        return found + [f"{path} is a pickle" for path in self.pickles]


def watch(folder: Path, settings: Sequence[str] = (), *, steps: int = 4, is_resumed: bool = False) -> Watched:
    """Runs the command in `folder`, where everything it writes and says stays, and returns what was seen."""
    (folder / "log").mkdir()
    words, found = [*small_run(folder), *RAY, f"trainer.run_dir={folder}/run"], Watched()
    for last in (steps, 2 * steps) if is_resumed else (steps,):
        _run([*words, *settings, f"trainer.total_steps={last}"], folder, found)
    for path in (folder / "log").iterdir():
        found.callers.update({line.removeprefix(f"{ROOT}{os.sep}") for line in path.read_text().splitlines()})
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    found.files, found.pickles = len(files), [path for path in files if is_pickle(path)]
    return found


def _run(words: Sequence[str], folder: Path, found: Watched) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent / "watched"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "UNPICKLING_LOG": str(folder / "log")}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "hybridflow.trainer.main_ppo", *words]
    with (
        (folder / "said").open("a") as said,
        subprocess.Popen(command, env=environment, stdout=said, stderr=said) as run,
    ):
        while run.poll() is None:
            found.listeners |= Counter(_listeners(psutil.Process(run.pid)))
            time.sleep(0.5)
    if run.returncode:
        raise RuntimeError(f"status {run.returncode}: {(folder / 'said').read_text()[-3000:]}")


def _listeners(driver: psutil.Process) -> Iterator[tuple[str, str]]:
    for process in (driver, *driver.children(recursive=True)):
        try:
            name, connections = process.name(), process.net_connections(kind="inet")
        except psutil.Error:  # it has ended
            continue
        yield from ((name, each.laddr.ip) for each in connections if each.status == psutil.CONN_LISTEN)


def is_pickle(path: Path) -> bool:
    """Whether an unpickler would read the whole file, or an entry of it if it is an archive, as torch's files are."""
    if not zipfile.is_zipfile(path):
        return _is_read_whole(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        return any(_is_read_whole(archive.read(name)) for name in archive.namelist())


def _is_read_whole(content: bytes) -> bool:
    try:
        *_, (_, _, last) = pickletools.genops(content)
    except Exception:  # noqa: BLE001 (whatever it trips over: no pickle)
        return False
    return last == len(content) - 1


def main() -> int:
    """Watches a run and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resumed", action="store_true")
    options, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), settings, steps=options.steps, is_resumed=options.resumed)
    for caller, count in sorted(found.callers.items()):
        print(f"{count:3} processes unpickle in {caller}")
    for (name, address), count in sorted(found.listeners.items()):
        print(f"{count:3} ports of {name} at {address}")
    print(f"{found.files} files, {len(found.pickles)} of them pickles")
    print("\n".join(problems := found.problems()) or "0 problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
