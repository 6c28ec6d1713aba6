"""A live Ray run under watch: who unpickles, who listens where, and whether what it writes holds a pickle.

    python -m tests.attacks.unpickling [--steps 4] [--resumed] [SETTING...]

Every process of the run has `watched/sitecustomize.py`. With `--resumed` the same command goes on from its checkpoint
to twice as many steps. Settings are added to those of a PPO run on two ranks, whose rewards are scored in processes.
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
OWN = ("hybridflow", "tests", "recipes", "benchmarks")
_SCORES = (
    "def score(completions, answer, **columns):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"
)


@dataclass
class Watched:
    """What was seen of a run."""

    callers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Processes in which a pickle was read, by package and by the file and function that read it."""

    listeners: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Listening sockets by the process's name and by address, at the moment when most were open."""

    pickles: list[Path] = field(default_factory=list)
    """Files of the run directory that are pickles."""

    files: int = 0
    """Files of the run directory."""

    def ours(self) -> set[str]:
        """The callers that belong to hybridflow."""
        return {caller for package, caller in self.callers if package in OWN}

    def problems(self) -> list[str]:
        """What must not be."""
        found = [
            f"{caller} unpickles" for caller in sorted(self.ours()) if caller.partition(":")[0] not in MAY_UNPICKLE
        ]
        found += [f"{name} listens at {address}" for name, address in self.listeners if not _is_loopback(address)]
        return found + [f"{path} is a pickle" for path in self.pickles]


def watch(folder: Path, settings: Sequence[str] = (), *, steps: int = 4, is_resumed: bool = False) -> Watched:
    """Runs the command in `folder`, where everything it writes and says stays, and answers what was seen."""
    (folder / "log").mkdir()
    (folder / "score.py").write_text(_SCORES)
    words = [*small_run(folder), *RAY, f"trainer.run_dir={folder}/run", f"reward.functions=[{folder}/score.py:score]"]
    found = Watched()
    for last in (steps, 2 * steps) if is_resumed else (steps,):
        _run([*words, *settings, f"trainer.total_steps={last}"], folder, found)
    for path in (folder / "log").iterdir():
        callers = {line.removeprefix(f"{ROOT}{os.sep}") for line in path.read_text().splitlines()}
        found.callers.update((caller.partition(os.sep)[0], caller) for caller in callers)
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
            listeners = Counter(_listeners(psutil.Process(run.pid)))
            found.listeners = max(found.listeners, listeners, key=Counter.total)
            time.sleep(0.5)
    if run.returncode:
        raise RuntimeError(f"status {run.returncode}: {(folder / 'said').read_text()[-3000:]}")


def _listeners(driver: psutil.Process) -> Iterator[tuple[str, str]]:
    for process in (driver, *driver.children(recursive=True)):
        try:
            connections = process.net_connections(kind="inet")
            name = process.name()
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                yield name, connection.laddr.ip


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def is_pickle(path: Path) -> bool:
    """Whether an unpickler would read the whole file, or an entry of it where it is an archive as torch's are."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(_is_pickle(archive.read(name)) for name in archive.namelist())
    return _is_pickle(path.read_bytes())


def _is_pickle(content: bytes) -> bool:
    try:
        for operation, _, place in pickletools.genops(content):
            if operation.name == "STOP":
                return place is not None and place + 1 == len(content)
    except Exception:  # noqa: BLE001 (whatever it trips over: no pickle)
        return False
    return False


def main() -> int:
    """Watches a run and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resumed", action="store_true")
    options, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), settings, steps=options.steps, is_resumed=options.resumed)
    for (package, caller), count in sorted(found.callers.items()):
        print(f"{package:16} unpickles in {count:2} processes: {caller}")
    for (name, address), count in sorted(found.listeners.items()):
        print(f"{name:16} listens on {count:2} ports at {address}")
    print(f"{found.files} files, {len(found.pickles)} of them pickles")
    print("\n".join(problems := found.problems()) or "0 problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
