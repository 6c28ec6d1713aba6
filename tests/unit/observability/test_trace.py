"""trace.json: what Perfetto reads, after a kill, after a resume, and in long runs."""

import json
import time
from pathlib import Path

import pytest

from hybridflow.observability.calls import Span
from hybridflow.observability.trace import TRACE_FILE, CallTrace, measured_calls, read_trace
from tests.unit.observability.test_calls import span

POOLS = {"policy": 2, "judge": 1}


def calls_of(step: int) -> list[Span]:
    """A call on two ranks, and one on another pool that takes its columns."""
    now, first = time.time(), 10 * step
    return [
        span(first, "policy", 0, now - 0.5, 0.2),
        span(first, "policy", 1, now - 0.6, 0.2, answers=False, waited=0.1),
        span(first + 1, "judge", 0, now - 0.3, 0.25, needs=(first,)),
    ]


def traced(folder: Path, steps: range, *, what: str = "step", keep: int = 5, ends: bool = False, **options) -> None:
    """Writes some steps, as one process, which then is killed or ends."""
    due: list[Span] = []
    trace = CallTrace(lambda: [due.pop(0) for _ in list(due)], options.pop("pools", POOLS), folder / TRACE_FILE,
                      keep=keep, **options)  # fmt: skip
    for step in steps:
        due += calls_of(step)
        trace.record(what, step, time.perf_counter() - 0.6, 0.6)
    if ends:
        trace.close()


def events_of(folder: Path) -> list[dict]:
    """The array, closed."""
    return json.loads((folder / TRACE_FILE).read_text().rstrip().rstrip(",") + "]")


def test_the_file_is_an_open_array_of_chrome_events_with_a_process_per_pool_and_a_thread_per_rank(tmp_path):
    traced(tmp_path, range(1, 3))
    events = events_of(tmp_path)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    pools = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(pools.values()) == ["driver", "pool policy", "pool judge"]
    assert sorted((pools[process], rank) for (process, _), rank in named.items()) == [
        ("pool judge", "rank 0"), ("pool policy", "rank 0"), ("pool policy", "rank 1"),
    ]  # fmt: skip
    assert len({thread for _, thread in named}) == 3, "Perfetto takes threads of one number for the same thread"
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices[:4]] == ["policy.work", "policy.work", "judge.work", "step 1"]
    about = {"step": 1, "call": 11, "rows": 4, "tokens": 40, "bytes_in": 100, "bytes_out": 10, "needs": [10],
             "peak_bytes": 1 << 30}  # fmt: skip
    assert slices[2]["args"] == {**about, "answers": True, "critical": True}
    assert slices[1]["args"]["critical"] is False
    arrow = [(event["ph"], event["pid"], event["tid"], event["id"]) for event in events if event["ph"] in "sf"][:2]
    assert arrow == [("s", *(slices[0][key] for key in ("pid", "tid")), 10_000),
                     ("f", *(slices[2][key] for key in ("pid", "tid")), 10_000)]  # fmt: skip
    assert slices[3]["args"]["critical_path_seconds"] == pytest.approx(0.45, abs=1e-5)
    assert slices[3]["args"]["idle_fraction"] == pytest.approx({"policy": 0.6667, "judge": 0.5833}, abs=0.02)


def test_what_is_written_is_read(tmp_path):
    traced(tmp_path, range(1, 3))
    [first, second] = read_trace(tmp_path)
    assert (first.what, first.step, first.pools) == ("step", 1, POOLS)
    assert first.seconds == pytest.approx(0.6, abs=1e-5)
    for found, given in zip(second.spans, calls_of(2), strict=True):
        assert found.start == pytest.approx(given.start, abs=5.0)
        assert found.seconds == pytest.approx(given.seconds, abs=2e-6)
        assert found.waited_seconds == pytest.approx(given.waited_seconds, abs=2e-6)
        for name in ("call", "role", "method", "pool", "rank", "rows", "tokens", "answers", "needs", "peak_bytes"):
            assert getattr(found, name) == getattr(given, name)
    assert measured_calls([first, second])["judge.work"].seconds == pytest.approx(0.25, abs=1e-5)
    assert read_trace(tmp_path / "nothing") == []


def test_a_step_that_was_torn_by_a_kill_is_left_out_and_the_next_process_goes_on(tmp_path):
    traced(tmp_path, range(1, 4))
    path = tmp_path / TRACE_FILE
    whole = path.read_bytes()
    for cut in (1, 40, 300, 600):
        path.write_bytes(whole[:-cut])
        assert [section.step for section in read_trace(tmp_path)] == [1, 2, 3][: 3 if cut == 1 else 2]
        traced(tmp_path, range(3, 5), resume_after=2)
        assert [section.step for section in read_trace(tmp_path)] == [1, 2, 3, 4]
        assert [event["name"] for event in events_of(tmp_path)].count("step 3") == 1


def test_a_finished_run_leaves_a_closed_array_which_a_resumed_run_continues(tmp_path):
    traced(tmp_path, range(1, 4), ends=True)
    whole = json.loads((tmp_path / TRACE_FILE).read_text())
    assert [event["name"] for event in whole if event.get("cat") == "step" and event["ph"] == "X"][-1] == "step 3"
    assert [section.step for section in read_trace(tmp_path)] == [1, 2, 3]
    traced(tmp_path, range(4, 6), resume_after=3)
    assert [section.step for section in read_trace(tmp_path)] == [1, 2, 3, 4, 5]
    assert "]\n" not in (tmp_path / TRACE_FILE).read_text().splitlines(keepends=True)
    traced(tmp_path, range(6, 7), resume_after=5, ends=True)
    assert json.loads((tmp_path / TRACE_FILE).read_text())[: len(whole) - 1] == whole[:-1]
    traced(tmp_path, range(8, 8), ends=True)
    assert [section.step for section in read_trace(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_trace_that_is_gone_is_not_closed(tmp_path, caplog):
    trace = CallTrace(list, POOLS, tmp_path / TRACE_FILE, keep=5)
    trace.record("step", 1, time.perf_counter(), 0.1)
    (tmp_path / TRACE_FILE).unlink()
    trace.close()
    trace.close()
    assert sum("its JSON array is not closed" in record.message for record in caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_on_other_pools_and_a_new_run_begin_their_own_trace(tmp_path):
    traced(tmp_path, range(1, 4))
    traced(tmp_path, range(3, 5), resume_after=2, pools=POOLS | {"more": 1})
    assert [section.step for section in read_trace(tmp_path)] == [3, 4]
    traced(tmp_path, range(1, 2))
    assert [section.step for section in read_trace(tmp_path)] == [1]


def test_a_long_run_keeps_its_latest_steps(tmp_path):
    sizes = []
    for last in range(2, 40, 7):
        traced(tmp_path, range(1, last), keep=5)
        steps = [section.step for section in read_trace(tmp_path)]
        assert steps == list(range(last - len(steps), last))
        assert min(5, last - 1) <= len(steps) <= 10
        sizes.append((tmp_path / TRACE_FILE).stat().st_size)
    traced(tmp_path, range(39, 60), keep=5, resume_after=38)
    assert [section.step for section in read_trace(tmp_path)][-5:] == [55, 56, 57, 58, 59]
    assert (tmp_path / TRACE_FILE).stat().st_size < 2.2 * max(sizes)


def test_nothing_is_written_without_steps_to_keep_and_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    traced(tmp_path, range(1, 3), keep=0)
    assert list(tmp_path.iterdir()) == []
    traced(tmp_path / "gone", range(1, 3))
    assert sum("the trace ends here" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", "7", '{"ph":"X"}', '{"ph":"X","pid":1,"tid":1,"name":"a","cat":"b","ts":"x","dur":1,"args":{}}',
     '{"ph":"X","pid":99,"tid":99,"name":"a","cat":"b","ts":1,"dur":1,"args":[]}', '{"ph":"M","pid":2,"tid":2}', "\0"],
)  # fmt: skip
def test_foreign_lines_are_skipped(tmp_path, line):
    traced(tmp_path, range(1, 3))
    path = tmp_path / TRACE_FILE
    path.write_text(path.read_text() + line + ",\n")
    assert [len(section.spans) for section in read_trace(tmp_path)] == [3, 3]
    traced(tmp_path, range(3, 4), resume_after=2)
    assert [section.step for section in read_trace(tmp_path)][-1] == 3
