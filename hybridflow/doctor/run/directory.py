"""The directory of a run, as it was left behind: every part may be missing or damaged."""

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import psutil
import yaml

from hybridflow.elastic.checkpoint import CheckpointStore, named_step, step_of
from hybridflow.elastic.claim import is_claimed
from hybridflow.elastic.resuming import CONFIG_FILE, FILES_OF_A_RUN
from hybridflow.errors import DataError
from hybridflow.observability.ending import UNRECORDED, Ending, read_ending
from hybridflow.observability.fault_ledger import FAULTS_FILE
from hybridflow.observability.jsonlines import Json, read_rows, rows_by_step
from hybridflow.observability.log_lines import LogLine, read_log, since_start
from hybridflow.observability.logs import LOG_FILE
from hybridflow.observability.trackers.jsonl import METRICS_FILE

_HOST = re.compile(
    r"host=(?P<host>\S+) pid=(?P<pid>\d+) .*?(?:memory_gb=(?P<memory>\d+) .*)?directory=(?P<directory>.*) commit="
)
_COMMAND = "command="
_FAILED = "failed: "
_BEGUN = "all roles have started"
_PROGRAM = "hybridflow"
_MOST_NAMED = 6
_SAME_SECONDS = 2.0


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which a run does not write, and with which a few lines describe gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                f"it has an alias in line {self.peek_event().start_mark.line + 1}, as no run writes them"
            )
        return super().compose_node(parent, index)


@dataclass(frozen=True)
class Start:
    """The latest start of a run, as run.log records it."""

    time: datetime
    host: str
    pid: int
    directory: str
    command: str
    memory_gb: int | None

    @property
    def is_here(self) -> bool:
        """Whether it was on this machine."""
        return self.host == socket.gethostname()


@dataclass(frozen=True)
class RunDirectory:
    """A run in its directory; each part is read at first use."""

    path: Path
    is_quick: bool = False
    doing: Callable[[str], None] = lambda what: None

    @cached_property
    def lines(self) -> list[LogLine]:
        """The lines of run.log since the latest start."""
        return [*since_start(read_log(self.path / LOG_FILE))]

    @cached_property
    def start(self) -> Start | None:
        """The latest start; None if run.log does not say."""
        command = next((line for line in self.lines if line.message.startswith(_COMMAND)), None)
        for line in self.lines:
            if (found := _HOST.match(line.message)) is not None:
                words = _typed(command.message.removeprefix(_COMMAND)) if command else ""
                memory = int(found["memory"]) if found["memory"] else None
                return Start(line.time, found["host"], int(found["pid"]), found["directory"], words, memory)
        return None

    @cached_property
    def config(self) -> Mapping[str, object]:
        """The settings; empty if config.yaml is missing. Raises `DataError` if it is damaged."""
        file = self.path / CONFIG_FILE
        try:
            found = yaml.load(file.read_text(encoding="utf-8"), _Loader)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            said = str(error).splitlines()[0]
            raise DataError(f"{file} is damaged: {said}.", remedy="Resume with the original command.") from error
        if not isinstance(found, dict):
            raise DataError(f"{file} holds no settings.", remedy="Resume with the original command.")
        return found

    def setting(self, key: str) -> object:
        """The value of a setting; None if it is not known."""
        found: object
        try:
            found = self.config
        except DataError:
            return None
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def rows(self) -> dict[int, dict[str, Json]]:
        """The metrics by step."""
        file = self.path / METRICS_FILE
        return rows_by_step(file) if file.is_file() else {}

    @property
    def last_step(self) -> int:
        """The last step with metrics or a checkpoint; 0 without any."""
        return max([*self.rows, *map(step_of, self.store.paths())], default=0)

    @cached_property
    def faults(self) -> list[dict[str, Json]]:
        """The faults of workers, in order."""
        file = self.path / FAULTS_FILE
        return [row for _, row in read_rows(file)] if file.is_file() else []

    @property
    def unread_faults(self) -> int:
        """The number of complete lines of faults.jsonl that cannot be read."""
        file = self.path / FAULTS_FILE
        return file.read_bytes().count(b"\n") - len(self.faults) if file.is_file() else 0

    @cached_property
    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        return CheckpointStore(self.path)

    @cached_property
    def unfinished_saves(self) -> list[int]:
        """The steps whose checkpoints were being written when the process ended."""
        found = self.store.directory.glob(".step_*.partial-*") if self.store.directory.is_dir() else ()
        return sorted(step for path in found if (step := named_step(path.name.split(".")[1])) is not None)

    @cached_property
    def is_claimed(self) -> bool:
        """Whether a process has locked the directory."""
        return is_claimed(self.path)

    @cached_property
    def process(self) -> psutil.Process | None:
        """The run's process on this machine; None if it has ended, or ran elsewhere."""
        if self.start is None or not self.start.is_here:
            return None
        try:
            process = psutil.Process(self.start.pid)
            is_own = process.create_time() <= self.start.time.timestamp() + _SAME_SECONDS
            return process if is_own and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    @cached_property
    def is_alive(self) -> bool:
        """Whether the run still runs, as far as this machine knows."""
        return self.is_claimed and (self.process is not None or self.start is None or not self.start.is_here)

    @cached_property
    def ending(self) -> Ending | None:
        """How the run ended, as it recorded itself; None if it runs, or was killed."""
        found = read_ending(self.path)
        if self.is_alive:
            return None
        if found in (None, UNRECORDED):
            # On a full disk, only the log may have it.
            return Ending("failed", self.logged_failure) if self.logged_failure and self.has_begun else None
        return found

    @property
    def has_begun(self) -> bool:
        """Whether the roles of the latest start have started, as far as run.log says."""
        return any(line.message.startswith(_BEGUN) for line in self.lines)

    @property
    def logged_failure(self) -> str:
        """The last error that the latest start has logged as its end; empty without one."""
        errors = [line.message for line in self.lines if line.level == "ERROR" and line.message.startswith(_FAILED)]
        last = errors[-1].removeprefix(_FAILED) if errors else ""
        return "" if last == UNRECORDED.said else last

    @property
    def was_killed(self) -> bool:
        """Whether it has ended without recording how."""
        return not self.is_alive and self.ending is None

    @cached_property
    def last_sign(self) -> datetime | None:
        """When the run last wrote a file, other than at its end."""
        files = [self.path / name for name in (METRICS_FILE, FAULTS_FILE, "samples.jsonl", "checkpoints")]
        times = [datetime.fromtimestamp(file.stat().st_mtime) for file in files if file.exists()]
        times += [line.time for line in self.lines if UNRECORDED.said not in line.message]
        return max(times, default=None)


def _typed(command: str) -> str:
    """A command as it was typed: `hybridflow ppo` without the interpreter that ran it."""
    interpreter, _, rest = command.partition(" ")
    program, _, words = rest.partition(" ")
    is_own = Path(interpreter).name.startswith("python") and Path(program).name == _PROGRAM
    return f"{_PROGRAM} {words}" if is_own else command


def open_run(path: Path, *, is_quick: bool, doing: Callable[[str], None]) -> RunDirectory:
    """The run in a directory; raises `DataError` if it holds none."""
    if not path.exists():
        raise DataError(f"There is no directory '{path}'.", remedy="Give the directory of a run (trainer.run_dir).")
    if not path.is_dir():
        raise DataError(f"'{path}' is a file.", remedy=f"Give the directory of a run, such as '{path.parent}'.")
    names = {each.name for each in path.iterdir()}
    if names & {*FILES_OF_A_RUN}:
        return RunDirectory(path, is_quick, doing)
    above = next((each for each in path.absolute().parents if (each / "checkpoints").is_dir()), None)
    inside = [each.parent for name in (CONFIG_FILE, LOG_FILE) for each in sorted(path.glob(f"*/{name}"))]
    runs = [str(each) for each in dict.fromkeys(inside)]
    remedy = "Give the directory of a run (trainer.run_dir)."
    if above is not None:
        remedy = f"It lies in the run {above}: give that directory."
    elif runs:
        more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
        remedy = f"It contains runs: {', '.join(runs[:_MOST_NAMED])}{more}. Give one of them."
    what = f"it has none of {', '.join(FILES_OF_A_RUN)}" if names else "it is empty, so no run has written to it"
    raise DataError(f"'{path}' is not the directory of a run: {what}.", remedy=remedy)
