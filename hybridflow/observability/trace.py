"""trace.json: the calls of the latest steps in Chrome's trace-event format, which https://ui.perfetto.dev opens.

A pool is a process, a rank a thread, and a call a slice on every rank; the first process is the driver, with a slice
for every step, evaluation and checkpoint. The JSON array is open while the run appends sections, and closed at its end.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridflow.observability.calls import CallTotal, Section, Span, medians
from hybridflow.observability.whole_files import replace_file

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"

STEP = "step"
"""The section of a training step; others are evaluations and checkpoints."""

Event = dict[str, Any]

_SEPARATOR = ",\n"
_MICROSECONDS = 1e6
_DRIVER = 1
"""The driver's process and its thread."""


class CallTrace:
    """Collects the calls of one section of a run after another, and writes them to a file.

    `drain` returns the calls that have ended since it was last called; `pools` are the ranks of every pool. Without a
    path, nothing is written. The file has at least the last `keep` steps, and at most twice as many; of an earlier
    process's file, steps up to `resume_after` remain if its pools were the same.

        trace = CallTrace(backend.drain_calls, {"main": 8}, run_dir / TRACE_FILE, keep=20)
        started = time.perf_counter()
        ...  # a training step
        section = trace.record("step", 1, started, time.perf_counter() - started)
    """

    def __init__(
        self,
        drain: Callable[[], Sequence[Span]],
        pools: Mapping[str, int],
        path: Path | None = None,
        *,
        keep: int = 0,
        resume_after: int = 0,
    ) -> None:
        self._drain = drain
        self._pools = pools
        self._path = path if keep > 0 else None
        self._keep = keep
        self._resume_after = resume_after
        self._first_step: int | None = None
        self._places: list[tuple[int, int]] = []
        """Where sections begin in the file, or the lines of an earlier process, and their steps, in order."""

    def skip(self) -> None:
        """Drops the calls that have ended since the last section."""
        self._drain()

    def record(self, what: str, step: int, started: float, seconds: float) -> Section:
        """The section that has ended; it began when `time.perf_counter()` was `started`."""
        start = time.time() - time.perf_counter() + started
        section = Section(what, step, start, seconds, self._drain(), self._pools)
        if self._path is not None:
            try:
                self._write(self._path, section)
            except OSError as error:
                logger.warning("file=%s cannot be written (%s): the trace ends here", self._path, error)
                self._path = None
        return section

    def close(self) -> None:
        """Closes the JSON array; nothing is written afterwards. A resumed run opens it again."""
        path, self._path = self._path, None
        if path is None or self._first_step is None:
            return
        try:
            with path.open("r+b") as file:
                file.seek(-len(_SEPARATOR), os.SEEK_END)
                if file.read() == _SEPARATOR.encode():
                    file.seek(-len(_SEPARATOR), os.SEEK_END)
                    file.write(b"\n]\n")
        except OSError as error:
            logger.warning("file=%s cannot be written (%s): its JSON array is not closed", path, error)

    def _write(self, path: Path, section: Section) -> None:
        if self._first_step is None:
            self._first_step = self._begin(path, section.step)
        elif section.step - self._first_step >= 2 * self._keep:
            self._first_step = section.step - self._keep + 1
            self._drop_earlier(path, self._first_step)
        with path.open("ab", buffering=0) as file:
            self._places.append((section.step, file.seek(0, os.SEEK_END)))
            file.write("".join(_section_lines(section)).encode())

    def _begin(self, path: Path, step: int) -> int:
        """Starts the file, or continues that of the process that the run resumes; returns its first step."""
        earlier = list(_lines(path)) if self._resume_after and path.is_file() else []
        kept: list[tuple[int, str]] = []
        if [line for of_step, line in earlier if of_step is None] == self._names():
            kept = [(of_step, line) for of_step, line in earlier if of_step is not None]
            kept = [(of_step, line) for of_step, line in kept if of_step <= self._resume_after]
        self._rewrite(path, [line for _, line in kept])
        place = path.stat().st_size - sum(len(line.encode()) for _, line in kept)
        for of_step, line in kept:
            self._places.append((of_step, place))
            place += len(line.encode())
        return min((of_step for of_step, _ in kept), default=step)

    def _drop_earlier(self, path: Path, first: int) -> None:
        """Drops the sections of steps before the first one to keep."""
        kept = [(step, begin) for step, begin in self._places if step >= first]
        with path.open("rb") as file:
            begin = file.seek(kept[0][1] if kept else 0, os.SEEK_SET if kept else os.SEEK_END)
            text = file.read().decode(errors="replace")
        self._rewrite(path, [text])
        moved = path.stat().st_size - len(text.encode()) - begin
        self._places = [(step, begin + moved) for step, begin in kept]

    def _rewrite(self, path: Path, lines: Iterable[str]) -> None:
        """Replaces the file, so that a process killed here loses nothing."""
        replace_file(path, "".join(["[\n", *self._names(), *lines]))

    def _names(self) -> list[str]:
        events = [_about("process_name", (_DRIVER, _DRIVER), name="driver")]
        for (pool, rank), place in _places(self._pools).items():
            if rank == 0:
                events.append(_about("process_name", place, name=f"pool {pool}"))
                events.append(_about("process_sort_index", place, sort_index=place[0]))
            events.append(_about("thread_name", place, name=f"rank {rank}"))
        return [_line(event) for event in events]


def read_trace(run_dir: Path) -> list[Section]:
    """The sections in the `trace.json` of a run directory, in order; none without the file. Skips torn lines."""
    path = run_dir / TRACE_FILE
    if not path.is_file():
        return []
    sections, spans, pools = list[Section](), list[Span](), dict[str, int]()
    of_process, of_thread = dict[int, str](), dict[int, int]()
    with path.open(encoding="utf-8", errors="replace") as file:
        for event in filter(None, map(_parsed, file)):
            with suppress(KeyError, TypeError, ValueError, AttributeError):  # a line that this package did not write
                process, thread = int(event["pid"]), int(event["tid"])
                if event["name"] == "process_name" and process != _DRIVER:
                    of_process[process] = str(event["args"]["name"]).removeprefix("pool ")
                elif event["name"] == "thread_name":
                    of_thread[thread] = int(event["args"]["name"].removeprefix("rank "))
                    pools[of_process[process]] = of_thread[thread] + 1
                elif event["ph"] == "X" and process == _DRIVER:
                    start, seconds = _times(event)
                    step = int(event["args"]["step"])
                    sections.append(Section(str(event["cat"]), step, start, seconds, spans, pools))
                    spans = []
                elif event["ph"] == "X":
                    spans.append(_span(event, of_process[process], of_thread[thread]))
    return sections


def measured_calls(sections: Iterable[Section]) -> dict[str, CallTotal]:
    """Seconds, rows, tokens and bytes of the calls of a training step: medians by name over the steps of a trace.

    measured = measured_calls(read_trace(run_dir))
    seconds, tokens = measured["rollout.generate"].seconds, measured["rollout.generate"].tokens
    """
    return medians(section for section in sections if section.what == STEP)


def _section_lines(section: Section) -> Iterator[str]:
    """The calls, and then the section itself: without its last line, it is incomplete."""
    path = section.critical_path()
    critical = {(span.call, span.rank) for span in path}
    places = _places(section.pools)
    of_call: dict[int, tuple[str, str]] = {}
    for span in section.spans:
        # Written by hand: a step of a thousand ranks has ten thousand of these lines.
        if span.call not in of_call:
            of_call[span.call] = (
                f'{{"ph":"X","name":{json.dumps(span.name)},"cat":{json.dumps(span.role)}',
                f'"args":{{"step":{section.step},"call":{span.call},"needs":{json.dumps(span.needs)}',
            )
        name, call = of_call[span.call]
        process, thread = places[span.pool, span.rank]
        waited = f',"waited_seconds":{span.waited_seconds:.6f}' if span.waited_seconds else ""
        yield (
            f'{name},"pid":{process},"tid":{thread},"ts":{int(span.start * _MICROSECONDS)},'
            f'"dur":{int(span.seconds * _MICROSECONDS)},{call},'
            f'"rows":{span.rows},"tokens":{span.tokens},"bytes_in":{span.bytes_in},"bytes_out":{span.bytes_out},'
            f'"peak_bytes":{span.peak_bytes}{waited},"answers":{"true" if span.answers else "false"},'
            f'"critical":{"true" if (span.call, span.rank) in critical else "false"}}}}}{_SEPARATOR}'
        )
    yield from map(_line, _section_events(section, path, places))


def _section_events(
    section: Section, path: Sequence[Span], places: Mapping[tuple[str, int], tuple[int, int]]
) -> Iterator[Event]:
    """The arrows of the critical path, and the section itself."""
    for number, (before, after) in enumerate(pairwise(path)):
        for phase, span in (("s", before), ("f", after)):
            yield _flow_end(section, number, phase, span, places[span.pool, span.rank])
    arguments = {
        "step": section.step,
        "critical_path_seconds": round(sum(map(section.seconds_within, path)), 6),
        "idle_fraction": {pool: round(idle, 4) for pool, idle in section.idle_fractions().items()},
    }
    name = f"{section.what} {section.step}"
    yield _slice(name, section.what, (_DRIVER, _DRIVER), (section.start, section.seconds), arguments)


def _slice(name: str, category: str, place: tuple[int, int], times: tuple[float, float], arguments: Event) -> Event:
    """A complete event. Whole microseconds, rounded down: slices of one rank do not overlap."""
    (process, thread), (start, seconds) = place, times
    microseconds = {"ts": int(start * _MICROSECONDS), "dur": int(seconds * _MICROSECONDS)}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, **microseconds, "args": arguments}


def _flow_end(section: Section, number: int, phase: str, span: Span, place: tuple[int, int]) -> Event:
    """The start (s) or the finish (f) of an arrow between two calls of the critical path."""
    flow = {"ph": phase, "bp": "e", "id": 10_000 * section.step + number, "cat": section.what, "name": "critical path"}
    times = {"ts": int(span.start * _MICROSECONDS), "args": {"step": section.step}}
    return {**flow, "pid": place[0], "tid": place[1], **times}


def _places(pools: Mapping[str, int]) -> dict[tuple[str, int], tuple[int, int]]:
    """Process and thread of every rank of every pool. Perfetto takes threads of one number for the same thread."""
    ranks = [(pool, rank) for pool, count in pools.items() for rank in range(count)]
    processes = {pool: process for process, pool in enumerate(pools, start=_DRIVER + 1)}
    return {(pool, rank): (processes[pool], thread) for thread, (pool, rank) in enumerate(ranks, start=_DRIVER + 1)}


def _about(kind: str, place: tuple[int, int], **arguments: str | int) -> Event:
    process, thread = place
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _span(event: Event, pool: str, rank: int) -> Span:
    start, seconds = _times(event)
    arguments = event["args"]
    role, method = str(event["cat"]), str(event["name"])
    return Span(
        int(arguments["call"]),
        role,
        method.removeprefix(f"{role}."),
        pool,
        rank,
        start,
        seconds,
        bytes_in=int(arguments["bytes_in"]),
        bytes_out=int(arguments["bytes_out"]),
        rows=int(arguments["rows"]),
        tokens=int(arguments["tokens"]),
        answers=bool(arguments["answers"]),
        needs=tuple(map(int, arguments["needs"])),
        peak_bytes=int(arguments.get("peak_bytes", 0)),
        waited_seconds=float(arguments.get("waited_seconds", 0.0)),
    )


def _times(event: Event) -> tuple[float, float]:
    return int(event["ts"]) / _MICROSECONDS, int(event["dur"]) / _MICROSECONDS


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":")) + _SEPARATOR


def _parsed(line: str) -> Event | None:
    """The event of a line; None for the array's beginning and end, and for a torn line."""
    try:
        event = json.loads(line.rstrip().removesuffix(","))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _lines(path: Path) -> Iterator[tuple[int | None, str]]:
    """The whole lines of a file, with their steps; those with names have none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            event = _parsed(line) if line.endswith("\n") else None
            if event is not None and isinstance(event.get("args"), dict):
                yield event["args"].get("step"), line.rstrip().removesuffix(",") + _SEPARATOR
