"""schedule.jsonl: what decides which weights sample which tokens in a run with partial rollouts, so that it can repeat.

A line per training step: the groups that were trained on, and the decoding steps of each replica in each call that the
new weights ended. All else follows from the settings and the data. A line `{"resumed": true}` says that groups were
generated again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.observability.jsonlines import Json, JsonLinesFile

SCHEDULE_FILE = "schedule.jsonl"

_KEY = "asynchrony.replay"
_RESUMED: dict[str, Json] = {"resumed": True}


@dataclass(frozen=True)
class RecordedStep:
    """A training step of the schedule."""

    yielded: Sequence[Sequence[int]]
    """Decoding steps of each replica, for each call that has ended since the step before."""

    trained: Sequence[int]
    """The `uid` of each group."""


class Schedule:
    """Writes the schedule of a run, and reads the one that it repeats, if any."""

    def __init__(self, path: Path, replayed: Path | None) -> None:
        self._path = path
        self._recorded = None if replayed is None else recorded_steps(replayed)
        self._yielded: list[Sequence[int]] = []
        self._is_resumed = False

    def limits(self, step: int, call: int) -> int | Sequence[int] | None:
        """How long a call continues: the decoding steps, or those of each replica; None: until another call waits.

        `call` counts those that were made while step `step` learned, from 0.
        """
        if self._recorded is None:
            return None
        after = self._recorded[step + 1].yielded if step + 1 < len(self._recorded) else []
        return after[call] if call < len(after) else 0

    def yielded(self, steps: Sequence[Sequence[int]]) -> None:
        """Calls have ended."""
        self._yielded += steps

    def end_step(self, step: int, trained: Sequence[int]) -> None:
        """Writes the line of a step; raises if the step that is repeated has trained on other groups."""
        yielded = [[*each] for each in self._yielded]
        if self._is_resumed and self._path.is_file():
            self._append(_RESUMED)
        self._is_resumed = False
        self._append({"step": step + 1, "yielded": yielded, "trained": [*trained]})
        self._yielded = []
        if self._recorded is not None and list(self._recorded[step].trained) != list(trained):
            raise HybridflowError(
                f"{_KEY}: step {step + 1} trains on the groups {list(trained)}, and the run that it repeats on"
                f" {list(self._recorded[step].trained)}.",
                remedy="Repeat a run with its settings, data, model and code.",
            )

    def resume(self) -> None:
        """Groups are generated again, so that the run cannot be repeated from here on; noted with the next step."""
        self._yielded = []
        self._is_resumed = True

    def _append(self, line: Mapping[str, Json]) -> None:
        file = JsonLinesFile(self._path)
        file.append(line)
        file.close()


def recorded_steps(run_dir: Path) -> list[RecordedStep]:
    """The schedule of a run; raises `ConfigError` if it has none, or cannot be repeated."""
    path = run_dir / SCHEDULE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{_KEY}={run_dir}: there is no {SCHEDULE_FILE}.",
            remedy="Name the directory of a run with asynchrony.partial_rollouts=true.",
            key=_KEY,
        )
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line break is empty, or a torn line
    if json.dumps(_RESUMED).encode() in lines:
        raise ConfigError(
            f"{_KEY}={run_dir}: the run was resumed, or continued after a fault, and generated groups again.",
            remedy="Repeat a run that was not interrupted.",
            key=_KEY,
        )
    if not lines:
        raise ConfigError(
            f"{_KEY}={run_dir}: {SCHEDULE_FILE} has no steps.",
            remedy="Name the directory of a run that has finished at least as many steps as this one has.",
            key=_KEY,
        )
    return [_recorded(line, number, path) for number, line in enumerate(lines, start=1)]


def _recorded(line: bytes, number: int, path: Path) -> RecordedStep:
    try:
        found = json.loads(line)
        yielded, trained = found["yielded"], found["trained"]
        if not (isinstance(yielded, list) and all(_is_integers(each) for each in [*yielded, trained])):
            raise TypeError(f"yielded={yielded!r} trained={trained!r}")
        return RecordedStep(yielded, trained)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{_KEY}={path.parent}: line {number} of {path.name} is not the record of a step.",
            remedy="Repeat a run whose schedule is complete.",
            key=_KEY,
        ) from error


def _is_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
