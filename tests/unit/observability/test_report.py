"""report.html: complete, self-contained, and safe whatever the samples hold."""

import html
import json
import math
import os
import re
import time
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.observability.calls import Span
from hybridflow.observability.ending import Ending, write_ending
from hybridflow.observability.fault_ledger import read_faults
from hybridflow.observability.report import write_report
from hybridflow.observability.report.catalogue import charts
from hybridflow.observability.report.charts import (
    Axis,
    Chart,
    line_chart,
    short_labels,
    smoothed,
    tick_label,
    value_axis,
)
from hybridflow.observability.report.config import config_section
from hybridflow.observability.report.record import Series, read_record
from hybridflow.observability.report.timing import stage_times
from hybridflow.observability.trace import CallTrace


def _run_dir(tmp_path, steps=40, response="<script>alert(1)</script>"):
    rows = [{"step": 0, "val-core/arithmetic/acc/mean@1": 0.4}]
    for step in range(1, steps + 1):
        rows.append({"step": step, "critic/score/mean": step / steps, "actor/grad_norm": None if step == 9 else 1.5})
        rows[-1] |= {"timing_s/gen": 1.0, "timing_s/update_actor": 0.5, "timing_s/step": 2.0, "my/own": step % 3}
        rows[-1]["my/flat"] = 1.0 + 1e-9 * step  # as float32 rounds
    rows[-1]["val-core/arithmetic/acc/mean@1"] = 0.83
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "cri')
    samples = [
        {"step": step, "split": "eval", "prompt": "12+34=", "response": text, "answer": "46", "score": score, "uid": 0}
        for step, text, score in ((0, response, 0.0), (steps, "46", 1.0))
    ]
    samples.append({"step": 5, "split": "train", "prompt": "p", "response": "\x1b[0m", "score": None, "uid": 9})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (tmp_path / "config.yaml").write_text(
        "trainer:\n  total_steps: 40  # origin: command line\n  seed: 0  # origin: default\n"
        "data:\n  shuffle: true  # origin: default\n"
    )
    return tmp_path


def balanced(page):
    """Fails on tags that do not nest, and on markup inside texts and attributes."""
    body = re.sub(r"<!doctype html>|<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    ElementTree.fromstring(re.sub(r"<(meta|input)([^>]*)>", r"<\1\2/>", body))


def test_the_time_of_the_steps_includes_the_copies_between_them(tmp_path):
    rows = [{"step": step, "timing_s/step": 2.0, "timing_s/testing": 9.0} for step in range(1, 5)]
    rows[2]["timing_s/snapshot"] = 5.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_record(tmp_path).seconds == 13.5


def test_the_report_is_one_balanced_page_without_outside_resources_that_shows_the_whole_run(tmp_path):
    path = write_report(_run_dir(tmp_path, response="45"))
    page = path.read_text()
    assert path == tmp_path / "report.html"
    balanced(page)
    outside = re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert outside == []
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "metrics.jsonl", "report.html", "samples.jsonl"]
    assert "arithmetic exact match" in page
    assert re.search(r"0\.830<small>from 0\.400", page)
    assert "40 steps, which took 1 min 20 s" in page
    for part in ("generate", "update actor", "other", "my/own", "1 became correct", "total_steps: 40", "command line"):
        assert part in page
    assert '<li class="c0">critic/score/mean</li>' in page and "<tr><td>my/flat</td><td>1.00</td></tr>" in page
    assert "step 40 (correct: a score of 0.5 or more)" in page
    assert '<span class="chip wrong" title="score 0">45</span>' in page


def _call(number: int, role: str, place: tuple[str, int], times: tuple[float, float], *, needs=(), waited=0.0) -> Span:
    sizes = {"bytes_in": 2_000_000, "bytes_out": 0, "rows": 8, "tokens": 1200, "peak_bytes": 0}
    return Span(
        number,
        role,
        "work",
        *place,
        times[0],
        times[1] - times[0],
        **sizes,
        answers=True,
        needs=needs,
        waited_seconds=waited,
    )


def _timeline(tmp_path, ranks: int, role: str = "judge", *, waited: float = 0.0) -> str:
    """The timeline of a step of 10 s: the actor's first 4 s on all ranks, 1 to 3 s of the judge, 5 s of the actor."""
    started = time.perf_counter() - 10.0
    begin = started + (time.time() - time.perf_counter())
    calls = [_call(1, "actor", ("main", rank), (begin, begin + 4.0 - rank / 100)) for rank in range(ranks)]
    calls.append(_call(2, role, ("small", 0), (begin + 1.0, begin + 3.0), waited=waited))
    calls += [_call(3, "actor", ("main", rank), (begin + 4.5, begin + 9.5), needs=(1, 2)) for rank in range(ranks)]
    calls.append(_call(4, "late", ("small", 0), (begin - 3.0, begin - 2.0)))
    trace = CallTrace(lambda: calls, {"main": ranks, "small": 1}, tmp_path / "trace.json", keep=3)
    trace.record("step", 40, started, 10.0)
    page = write_report(_run_dir(tmp_path)).read_text()
    balanced(page)
    return page.partition('<section id="timeline">')[2].partition("</section>")[0]


def test_the_last_step_is_drawn_with_a_row_per_rank_idle_pools_and_the_critical_path(tmp_path):
    drawn = _timeline(tmp_path, ranks=2)
    assert "Step 40 as a timeline" in drawn
    assert re.search(
        r"critical path, 9(\.00)? s of the 10(\.0)? s", drawn
    )  # times are whole microseconds, rounded down
    assert "main: 2 ranks, idle 10%" in drawn and "small: 1 rank, idle 80%" in drawn
    assert [drawn.count(f">rank {rank}<") for rank in range(3)] == [2, 1, 0]
    calls = re.findall(r'<g class="call (r\d)( critical)?"><title>(\w+)\.work: ([\d.]+) s', drawn)
    assert sorted(calls) == [
        ("r0", "", "actor", "3.99"), ("r0", "", "actor", "5"), ("r0", " critical", "actor", "4"),
        ("r0", " critical", "actor", "5"), ("r1", "", "judge", "2"),
    ]  # fmt: skip
    assert "late" not in drawn, "it ran before the step"
    cells = re.sub(r"</?t[dr]>", "|", drawn).replace("||", "|")
    assert re.search(r"actor\.work\|9(\.00)?\|90%\|9(\.00)?\|9(\.00)?\|32\|4\.8k\|8\|", cells)


@pytest.mark.parametrize("ranks", [2, 40])
def test_a_call_that_waits_for_another_pool_is_idle_until_it_works(tmp_path, ranks):
    drawn = _timeline(tmp_path, ranks=ranks, waited=1.5)
    assert "small: 1 rank, idle 95%" in drawn
    widths = re.findall(r'width="([\d.]+)" height="24.0"(?: rx="2")?/>', drawn.partition("judge.work: 2 s")[2])
    wait, work = widths[:2]
    assert float(wait) == pytest.approx(3 * float(work), rel=0.01) and drawn.count('class="wait"') == 1
    assert ", 1.50 s of it waiting for another pool" in drawn


def test_more_than_16_ranks_are_drawn_as_one_row_per_pool(tmp_path):
    drawn = _timeline(tmp_path, ranks=40)
    assert drawn.count(">all ranks<") == 2 and ">rank 0<" not in drawn
    assert drawn.count("<title>") == 3 and drawn.count(' critical"') == 2
    assert len(drawn) < 12_000


def test_names_in_a_timeline_are_escaped(tmp_path):
    assert "<script>" not in _timeline(tmp_path, ranks=1, role="<script>alert(1)</script>")


def test_faults_are_marked_on_the_curves_and_listed_with_their_cost(tmp_path):
    died = {"step": 20, "kind": "process", "fault": "WorkerDied", "role": "rollout", "rank": 1, "method": "generate"}
    died |= {"message": "<script>alert(1)</script>", "pools": "main", "resumed_step": 10, "cost_seconds": 16.0}
    died |= {"repeated_steps": 9, "source": "a copy in memory"}
    ended = {"step": 40, "kind": "storage", "fault": "ResourceError", "message": "The disk is full"}
    (_run_dir(tmp_path) / "faults.jsonl").write_text(json.dumps(died) + "\n" + json.dumps(ended) + "\n")
    page = write_report(tmp_path).read_text()
    balanced(page)
    assert "40 steps, which took 1 min 20 s; 1 fault cost another 16 s" in page
    charts = re.findall(r"<svg[^>]*data-chart.*?</svg>", page)
    assert len(charts) > 3
    for chart in charts:
        places = re.findall(r'<g class="fault (\w+)"><path class="cross" d="M([\d.]+) ', chart)
        # The axis goes from step 0 or 1, at 44, to step 40, at 362.
        assert [kind for kind, _ in places] == ["survived", "fatal"]
        assert 194 < float(places[0][1]) < 200 and 354 < float(places[1][1]) < 362
    section = page.partition('<section id="faults"')[2].partition("</section>")[0]
    assert "16 s were lost to them, 17% of the run's time." in section and "<script>alert" not in section
    cells = re.sub(r"<[^>]+>+", "|", section)
    assert re.search(r"\|20\|+process\|.*WorkerDied: rollout rank 1, generate\|+new processes in main;", cells)
    assert "continued after step 10, from a copy in memory, 9 steps back||16 s|" in cells and "the run ended" in cells
    marks = json.loads(html.unescape(re.search(r'data-faults="([^"]*)"', page)[1]))
    assert marks[0] == [
        19.5,
        "fault in step 20 (process): new processes in main; continued after step 10, from a copy in memory,"
        " 9 steps back",
    ]


@pytest.mark.parametrize("cost", ["NaN", "Infinity", "-1e300", "1" + "0" * 400, '"16"', "[]"])
def test_a_cost_that_is_no_time_does_not_keep_the_report_from_being_written(tmp_path, cost):
    row = f'{{"step": 20, "kind": "process", "fault": "WorkerDied", "resumed_step": 10, "cost_seconds": {cost}, '
    (_run_dir(tmp_path) / "faults.jsonl").write_text(row + '"repeated_steps": 9}\n')
    assert "continued after step 10, 9 steps back" in write_report(tmp_path).read_text()


def test_a_fault_after_which_the_devices_changed_names_the_new_plan(tmp_path):
    lost = {"step": 8, "kind": "lost_node", "pools": "main", "plan": "8 devices instead of 16", "resumed_step": 6}
    lost["repeated_steps"] = 1
    (tmp_path / "faults.jsonl").write_text(json.dumps(lost) + "\n")
    (fault,) = read_faults(tmp_path)
    assert fault.outcome == "a new plan with 8 devices instead of 16; continued after step 6, 1 step back"


def test_a_tile_says_which_step_was_evaluated_last_and_over_how_many_steps_a_mean_is(tmp_path):
    rows = [{"step": step, "critic/score/mean": step / 20} for step in range(1, 13)]
    rows = [{"step": 0, "val-core/sums/acc/mean@1": 0.4}, *rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    assert "0.400<small>at step 0</small>" in page
    assert "0.500<small>from 0.150 (means of 5 steps)</small>" in page
    rows[10]["val-core/sums/acc/mean@1"] = 0.6
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0.600<small>at step 10, from 0.400</small>" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("response", ["<script>alert(1)</script>", "<script>alert(1)</script>" * 200])
def test_samples_are_text_and_never_markup(tmp_path, response):
    page = write_report(_run_dir(tmp_path, response=response)).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    balanced(page)


@pytest.mark.parametrize(
    ("row", "found"), [('{"step": 1, "loss": 0.5}\n', "Curves"), ("", "This run has written no metrics yet")]
)
def test_a_run_with_metrics_alone_or_without_any_has_a_report(tmp_path, row, found):
    (tmp_path / "metrics.jsonl").write_text(row)
    page = write_report(tmp_path).read_text()
    balanced(page)
    assert found in page and "Configuration" not in page


def test_lines_of_one_step_are_one_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "a": 1}\n{"step": 1, "a": 3}\n{"step": 2, "b": 1' + "0" * 400 + "}\n"
    )
    record = read_record(tmp_path)
    assert (record.metrics["a"].steps, record.metrics["a"].values) == ([1, 2], [3.0, 1.0])
    assert record.metrics["b"].steps == [2]
    assert math.isnan(record.metrics["b"].values[0])


def test_a_long_run_stays_light_and_keeps_its_spike():
    values = [1.0] * 20_000
    values[12_345] = 77.0
    drawing = line_chart(Chart("grad norm", [Series("actor/grad_norm", list(range(20_000)), values)]))
    assert len(drawing) < 30_000
    assert "77.0" in drawing


def test_a_line_breaks_where_a_value_is_missing():
    drawing = line_chart(Chart("x", [Series("x", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 2.0, 1.0])]))
    (path,) = re.findall(r' d="([^"]*)"', drawing)
    assert path.count("M") == 2


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e12, 2e12], [-3.0, 4.0]])
@pytest.mark.parametrize("is_log", [False, True])
def test_any_values_can_be_drawn(values, is_log):
    drawing = line_chart(Chart("x", [Series("x", list(range(len(values))), values)], is_log=is_log))
    assert "nan" not in drawing
    assert "inf" not in drawing


def test_an_axis_holds_its_values_and_has_round_ticks():
    axis = value_axis([0.37, 0.92], 100.0, 0.0)
    assert 0.0 <= axis.place(0.92) < axis.place(0.37) <= 100.0
    assert [label for _, label in axis.ticks(7)] == ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9"]
    powers = value_axis([3e-7, 2e-5], 100.0, 0.0, is_log=True).ticks(6)
    assert [label for _, label in powers] == ["1e-7", "1e-6", "1e-5", "1e-4"]
    pairs = [(0.3, 0.1), (20.0, 20.0), (2000.0, 1000.0), (2e-6, 1e-6), (0.0164, 5e-5)]
    assert [tick_label(*pair) for pair in pairs] == ["0.3", "20", "2k", "2e-06", "0.01640"]


@given(st.floats(-1e9, 1e9), st.floats(1e-7, 1e3), st.integers(2, 9))
def test_neighboring_ticks_have_different_labels(middle, share, wanted):
    span = max(abs(middle), 1e-6) * share
    labels = [label for _, label in Axis(middle - span, middle + span, 0.0, 100.0).ticks(wanted)]
    assert len(set(labels)) == len(labels)


def test_smoothing_starts_at_the_first_value_and_skips_what_is_missing():
    assert smoothed([2.0, 2.0, math.nan, 2.0]) == pytest.approx([2.0] * 4)
    assert math.isnan(smoothed([math.nan, 1.0])[0])


def test_labels_lose_what_all_share():
    assert short_labels(["actor/grad_norm", "critic/grad_norm"]) == ["actor", "critic"]
    assert short_labels(["val-core/a/acc/mean@1", "val-core/b/acc/mean@1"]) == ["a", "b"]
    assert short_labels(["x", "x/y"]) == ["x", "x/y"]


def test_stages_fill_the_step_in_order_with_the_rest_as_other():
    steps, seconds = stage_times(
        {
            "timing_s/update_actor": Series("timing_s/update_actor", [1, 2], [1.0, 1.0]),
            "timing_s/step": Series("timing_s/step", [1, 2], [4.0, 6.0]),
            "timing_s/gen": Series("timing_s/gen", [1, 2], [2.0, 2.0]),
            "timing_s/testing": Series("timing_s/testing", [2], [1.0]),
            "timing_s/reshard": Series("timing_s/reshard", [1, 2], [0.5, 0.5]),
        }
    )
    assert steps == [1, 2]
    assert seconds == {"gen": [2.0, 2.0], "update_actor": [1.0, 1.0], "testing": [0.0, 1.0], "other": [1.0, 2.0]}


def test_defaults_are_marked_so_that_changed_settings_stand_out():
    text = (
        "trainer:\n  total_steps: 9  # origin: command line\n  seed: 0  # origin: default\n"
        "  trackers:  # origin: file\n  - jsonl\ndata:\n  shuffle: true  # origin: default\n"
        "actor:\n  optimizer:\n    lr: 1e-4  # origin: file x.yaml\n"
    )
    lines = re.findall(r'<span class="(changed|default)">\s*-?\s*([a-z_]+)', config_section(text))
    changed = [name for kind, name in lines if kind == "changed"]
    assert changed == ["trainer", "total_steps", "trackers", "jsonl", "actor", "optimizer", "lr"]
    assert [name for kind, name in lines if kind == "default"] == ["seed", "data", "shuffle"]


TIED = '{"step": %d, "frac_reward_zero_std": 1.0, "actor/grad_norm": 0.0}\n'
LOG = """2026-11-22 09:00:00,000 INFO    hybridflow.observability.logs started hybridflow=0.1.0
2026-11-22 09:00:00,000 WARNING hybridflow.data.length_limits 3 of 9 rows are left (33%)
2026-11-23 09:00:00,000 INFO    hybridflow.observability.logs started hybridflow=0.1.0
2026-11-23 09:00:00,000 WARNING hybridflow.data.length_limits 21 of 2308 rows are <left> (1%)
2026-11-23 09:00:00,000 WARNING hybridflow.launch.execute critic.epochs=3 has no effect
2026-11-23 09:00:00,000 WARNING hybridflow.dataflows.loop Nothing is being learned (steps 1 to 3): all samples
2026-11-23 09:00:00,000 INFO    hybridflow.launch.execute all roles have started
"""


def test_the_first_row_says_that_nothing_is_learned_and_which_data_is_lost(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(TIED % step for step in range(1, 5)))
    (tmp_path / "run.log").write_text(LOG)
    page = write_report(tmp_path).read_text()
    balanced(page)
    header = page[page.index("<header>") : page.index('<div class="tiles">')]
    assert re.findall(r'class="advice">(?:<strong>)?(.{20})', header) == [
        "Nothing is being lea",
        "21 of 2308 rows are ",
    ]
    assert "(steps 1 to 4)" in header and "What to do: Read the samples" in header and "&lt;left&gt;" in header
    assert "3 of 9" not in page and header.count("<li>") == 1 and "critic.epochs=3 has no effect" in header
    (tmp_path / "metrics.jsonl").write_text((TIED % 1).replace("1.0", "0.5"))
    (tmp_path / "run.log").unlink()
    assert 'class="advice"' not in write_report(tmp_path).read_text()


def test_the_page_of_a_run_refreshes_itself_until_the_run_has_ended(tmp_path):
    assert 'data-refresh="5"' in write_report(_run_dir(tmp_path)).read_text()
    assert "data-refresh" not in write_report(tmp_path, is_over=True).read_text()
    write_ending(tmp_path, Ending("done", "40 steps"))
    assert "data-refresh" not in write_report(tmp_path).read_text()


def test_conversations_are_shown_by_the_users_turn_without_what_all_share(tmp_path):
    end = " Let us think step by step."
    rows = [
        {"step": step, "split": "eval", "prompt": f"<|user|>{x} + {x}?{end}<|assistant|>", "response": f"{x}" * 30}
        | {"answer": None, "score": 0.0, "uid": x, "question": f"{x} + {x}?{end}"}
        for step in (0, 5)
        for x in (3, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.findall("<h3>(.*?)</h3>", write_report(tmp_path).read_text()) == ["3 + 3?\u2026", "4 + 4?\u2026"]


def test_episodes_are_shown_turn_by_turn(tmp_path):
    turns = [
        {"role": "assistant", "content": "left", "reward": 0.25},
        {"role": "user", "content": "You <b>fell</b>."},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "", "reward": 0},
        {"role": "user", "content": "Again.", "begins_fork": True},
        {"role": "assistant", "content": "left"},
    ]
    row = {"step": 3, "split": "train", "prompt": "go", "response": "left You fell.", "score": 0.25, "uid": 1}
    rows = [row | {"turns": turns}, row | {"turns": [7, {}]}, row | {"turns": "no"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "environment/info/solved": 0.5, "num_turns/mean": 2}\n')
    page = write_report(tmp_path).read_text()
    balanced(page)
    shown = re.findall(r'<li class="(\w+)"><span class="note">(.*?)</span>(?:<div>(.*?)</div>)?</li>', page)
    assert shown[:7] == [
        ("model", 'model <b title="reward">0.250</b>', "left"),
        ("environment", "environment", "You &lt;b&gt;fell&lt;/b&gt;."),
        ("tool", "tool", "4"),
        ("model", 'model <b title="reward">0</b>', "(empty)"),
        ("fork", "fork: a new sequence begins", ""),
        ("environment", "environment", "Again."),
        ("environment", "environment (as assistant)", "left"),
    ]
    assert page.count('<ol class="turns">') == 2 and "Turns per episode" in page


def test_asynchronous_runs_have_charts_of_staleness_and_of_the_groups_that_are_generated_ahead():
    names = ("async/groups/running", "async/staleness/max", "async/tokens/generated", "async/staleness/mean")
    metrics = {name: Series(name, [1, 2], [0.0, 1.0]) for name in names}
    assert {chart.title: [series.name for series in chart.series] for chart in charts(metrics)} == {
        "Staleness": ["async/staleness/max", "async/staleness/mean"],
        "Groups ahead": ["async/groups/running"],
    }
