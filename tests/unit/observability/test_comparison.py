"""The page that compares runs of different lengths, ends and dataflows."""

import json
import re
from pathlib import Path

from hybridflow.observability.ending import Ending, write_ending
from hybridflow.observability.report.comparison import comparison_page, run_names
from hybridflow.observability.report.config import differing_settings
from hybridflow.observability.report.record import RunRecord, read_record
from tests.unit.observability.test_report import balanced


def record(run_dir: Path, *, metric="critic/score/mean", steps=20, config="", samples=(), ending=None) -> RunRecord:
    run_dir.mkdir(parents=True)
    rows: list[dict] = [{"step": step, metric: step / 100} for step in range(1, steps + 1)]
    for row in rows[4::5]:
        row["val-core/sums/acc/mean@1"] = 0.9 if row["step"] == 5 else 0.5
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (run_dir / "config.yaml").write_text(config)
    if ending is not None:
        write_ending(run_dir, ending)
    return read_record(run_dir)


def sample(prompt, response, score, *, step=20, question=None):
    row = {"step": step, "split": "eval", "prompt": prompt, "response": response, "answer": "7", "score": score}
    return row | {"uid": len(prompt), "question": question}


def hovered(page: str, title: str) -> list[tuple[str, int]]:
    """The series of a chart, with how many points each has."""
    data = re.search(rf"""aria-label="{title}" data-chart='([^']*)'""", page)
    assert data is not None
    series = json.loads(data[1].replace("&quot;", '"'))["series"]
    return [(each["label"], len(each["x"])) for each in series]


def test_runs_of_any_length_end_and_dataflow_are_on_one_page(tmp_path):
    runs = {
        "long": record(tmp_path / "long", ending=Ending("done", "20 steps")),
        "short": record(
            tmp_path / "short", steps=7, ending=Ending("failed", "RewardError: <mine> raised. What to do: Mend it.")
        ),
        "sft": record(tmp_path / "sft", metric="train/loss", steps=4),
        "new": record(tmp_path / "new", steps=0, ending=Ending("interrupted", "No checkpoint was saved.")),
    }
    page = comparison_page(runs, is_renewed=True)
    balanced(page)
    assert 'data-refresh="5"' in page and "4 runs" in page
    assert hovered(page, "Score") == [("long", 20), ("short", 7), ("sft", 0), ("new", 0)]
    assert hovered(page, "Loss") == [("long", 0), ("short", 0), ("sft", 4), ("new", 0)]
    assert '<li class="c2">sft</li></ul>' in page  # alone in its legend, in its own color
    for part in (
        "<b>0.500</b> <small>at step 20</small><br/><small>best 0.900 at step 5</small>",
        "<b>0.900</b> <small>at step 5</small></td>",
        '<b class="ending running">running</b>',
        ">RewardError: &lt;mine&gt; raised.</small>",
        "0.180 <small>mean of 5 steps</small>",
        "No two of these runs have recorded responses to the same evaluation prompt.",
        "Fewer than two runs have a config.yaml.",
    ):
        assert part in page
    assert "data-refresh" not in comparison_page(runs)


def test_settings_that_differ_are_listed_chosen_ones_first_without_names_of_runs():
    common = "trainer:\n  seed: 0  # origin: default\n  run_dir: {run}  # origin: command line\n"
    first = common + "  devices: 1  # origin: default; resolved to: 1\n  trackers:  # origin: file\n  - jsonl\n"
    second = common + (
        "  devices: 2  # origin: default; resolved to: 2\n  trackers:  # origin: file\n  - jsonl\n  - console\n"
        "actor:\n  optimizer:\n    learning_rate: 0.1  # origin: <file>\n"
    )
    table = differing_settings({"a": first.format(run="a"), "b": second.format(run="b"), "old": ""})
    assert re.findall(r"<tr><th>([a-z_.]+)</th>", table) == [
        "trainer.trackers",
        "actor.optimizer.learning_rate",
        "trainer.devices",
    ]
    assert '<td class="changed" title="origin: file">- jsonl</td>' in table
    assert '<td class="changed" title="origin: file">- jsonl - console</td>' in table
    assert '<td></td><td class="changed" title="origin: &lt;file&gt;">0.1</td>' in table
    assert "The runs have the same settings." in differing_settings({"a": first, "b": first})


def test_responses_to_the_same_prompts_stand_side_by_side_those_of_different_scores_first(tmp_path):
    long = "because " * 20
    first = [sample("<a>", "7", 1.0), sample("b", "7", 1.0), sample("mine", "7", 1.0), sample("b", "old", 0, step=5)]
    second = [sample("b", "8", 0.0, step=10), sample("<a>", "7", 1.0, step=10)]
    runs = {"one": record(tmp_path / "one", samples=first), "two": record(tmp_path / "two", samples=second)}
    page = comparison_page(runs)
    balanced(page)
    assert "2 evaluation prompts in common" in page and "<th>one, step 20</th><th>two, step 10</th>" in page
    assert re.findall(r"<tr><th>([^<]*)</th><td><span", page) == ["b", "&lt;a&gt;"]
    chats = [
        sample(f"user\nHow many {x}? {long}\nassistant", long, 1.0, question=f"How many {x}? {long}") for x in "pq"
    ]
    more = {name: record(tmp_path / f"{name}_chat", samples=chats) for name in runs}
    page = comparison_page(more)
    balanced(page)
    assert re.findall(r'<article class="card pair"><h3>([^<]*)</h3>', page) == [
        "How many p?\u2026",
        "How many q?\u2026",
    ]
    assert page.count(f'<div class="text">{long}</div>') == 4


def test_runs_are_called_by_their_directories_and_by_their_paths_where_those_are_equal(tmp_path):
    assert run_names([tmp_path / "a/x", tmp_path / "b"]) == ["x", "b"]
    assert run_names([Path("a/x"), Path("b/x"), Path("c")]) == ["a/x", "b/x", "c"]
