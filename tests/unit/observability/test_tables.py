"""Samples and their tables."""

import math
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybridflow.observability.samples import Sample, followed, pairs, sample_of_row, turned
from hybridflow.observability.tables import before_after_table, clip, sample_table, visible


def _sample(uid, score, response="46", prompt=None, answer: str | None = "46", split="eval"):
    return Sample(prompt or f"{uid}+34=", response, answer, score, uid, split)


def _rendered(make, *arguments, width=80, **options):
    console = Console(file=StringIO(), width=width, **options)
    console.print(make(*arguments, console=console, title="samples  step 5"))
    return console.file.getvalue()


def test_a_sample_survives_its_row():
    sample = Sample("1+1=", "2", None, 1.0, 7, "train")
    assert sample_of_row(sample.row(12)) == sample
    assert list(sample.row(12)) == ["step", "split", "prompt", "response", "answer", "score", "uid"]
    assert math.isnan(sample_of_row({"step": 1, "score": None}).score)


def test_pairs_match_prompts_and_take_the_first_response_of_each():
    before = [_sample(1, 0.0), _sample(2, 1.0), _sample(3, 0.0)]
    now = [_sample(2, 0.0), _sample(1, 1.0), _sample(1, 0.0), _sample(9, 1.0)]
    found = pairs(before, now)
    assert [(pair.before.score, pair.now.score, pair.now.uid) for pair in found] == [(0.0, 1.0, 1), (1.0, 0.0, 2)]
    assert (turned(found), turned(found[:1]), turned(found[1:])) == ((1, 1), (1, 0), (0, 1))


def test_watched_samples_are_the_wrong_ones_and_one_right():
    samples = [_sample(uid, float(uid in (1, 3, 6))) for uid in range(8)]
    assert [sample.uid for sample in followed(samples, 4)] == [0, 1, 2, 4]
    assert len(followed(samples, 20)) == 8
    assert [sample.uid for sample in followed([samples[1], samples[3]], 4)] == [1, 3]
    assert followed([], 4) == []


def test_spaces_at_the_ends_and_line_ends_are_visible():
    assert visible(" 12 + 3 ") == "·12 + 3·"
    assert visible(" " * 10 + "12") == "·…·12"
    assert visible("a\nb\tc\r\n") == "a↵b→c↵"
    assert visible("") == "(empty)"
    assert visible("\x1b[31mred\u202e\ud800") == "\\x1b[31mred\\u202e\\ud800"


@pytest.mark.parametrize(("keep", "text"), [("start", "abcd…"), ("end", "…ghij"), ("both", "ab…ij")])
def test_clip_keeps_what_is_asked(keep, text):
    assert clip("abcdefghij", 5, keep=keep) == text
    assert clip("abcde", 5, keep=keep) == "abcde"
    assert cell_len(clip("漢字漢字漢字漢字", 9, keep=keep)) <= 9


def test_a_table_off_a_terminal_is_plain_and_marks_right_and_wrong():
    samples = [_sample(1, 1.0, "[bold]x[/bold]", answer=None), _sample(2, 0.0, "r" * 50, answer=None)]
    text = _rendered(sample_table, [*samples, _sample(3, math.nan, answer=None)])
    assert "\x1b" not in text and "answer" not in text
    assert "[bold]x[/bold]" in text and "r" * 50 in text
    rows = text.splitlines()[4:]
    assert [row.split()[-1] for row in rows] == ["✓", "✗", "-"]
    colored = _rendered(sample_table, samples, force_terminal=True)
    assert "\x1b[32m[bold]x" in colored and "\x1b[31mrr" in colored
    assert text.splitlines()[:2] == ["samples  step 5", "correct: a score of 0.5 or more"]


@pytest.mark.parametrize("width", range(60, 161))
def test_the_scores_are_whole_at_every_width(width):
    found = pairs([_sample(1, 0.0, "so " * 500, "why " * 300)], [_sample(1, 0.25, "thus " * 500, "why " * 300)])
    row = _rendered(before_after_table, found, width=width).splitlines()[-1]
    assert row.endswith("  0 ✗ > 0.250 ✗") and cell_len(row) <= width
    long = [_sample(1, 0.25, "so " * 500, "why " * 300 + "QUESTION", answer="because " * 9)]
    lines = _rendered(sample_table, long, width=width).splitlines()
    assert lines[-1].endswith("  0.250 ✗") and "QUESTION" in lines[-1] and len(lines) == 5
    assert max(map(cell_len, lines)) <= width


def test_before_and_now_stand_side_by_side():
    found = pairs([_sample(12, 0.0, "45")], [_sample(12, 1.0, "46")])
    row = _rendered(before_after_table, found).splitlines()[-1]
    assert row.split() == ["12+34=", "45", "46", "0", "✗", ">", "1", "✓"]
