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
    assert sample_of_row(sample.row(12)) == (12, sample)
    assert list(sample.row(12)) == ["step", "split", "prompt", "response", "answer", "score", "uid"]


def test_a_row_without_a_score_reads_as_nan():
    assert math.isnan(sample_of_row({"step": 1, "score": None})[1].score)


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


def test_no_control_sequence_reaches_the_terminal():
    assert visible("\x1b[31mred\u202e\ud800") == "\\x1b[31mred\\u202e\\ud800"


@pytest.mark.parametrize(("keep", "text"), [("start", "abcd…"), ("end", "…ghij"), ("both", "ab…ij")])
def test_clip_keeps_what_is_asked(keep, text):
    assert clip("abcdefghij", 5, keep=keep) == text
    assert clip("abcde", 5, keep=keep) == "abcde"


def test_clip_counts_wide_characters():
    assert cell_len(clip("漢字漢字漢字漢字", 9, keep="both")) <= 9


def test_a_table_off_a_terminal_is_plain_and_marks_right_and_wrong():
    text = _rendered(sample_table, [_sample(1, 1.0), _sample(2, 0.0), _sample(3, math.nan)])
    assert "\x1b" not in text
    rows = text.splitlines()[4:]
    assert [row.split()[-1] for row in rows] == ["✓", "✗", "-"]
    assert text.splitlines()[:2] == ["samples  step 5", "correct: a score of 0.5 or more"]


def test_a_table_on_a_terminal_colours_by_score():
    text = _rendered(sample_table, [_sample(1, 1.0, "good"), _sample(2, 0.0, "bad")], force_terminal=True)
    assert "\x1b[32mgood" in text
    assert "\x1b[31mbad" in text


@pytest.mark.parametrize("width", [50, 80, 120])
def test_long_texts_keep_the_table_within_the_terminal(width):
    long = [_sample(1, 1.0, response="so " * 500, prompt="why " * 300 + "QUESTION", answer="because " * 9)]
    text = _rendered(sample_table, long, width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert len(text.splitlines()) == 5
    assert "QUESTION" in text


@pytest.mark.parametrize("width", range(60, 161))
def test_the_scores_are_whole_at_every_width(width):
    found = pairs([_sample(1, 0.0, "so " * 500, "why " * 300)], [_sample(1, 0.25, "thus " * 500, "why " * 300)])
    row = _rendered(before_after_table, found, width=width).splitlines()[-1]
    assert row.endswith("  0 ✗ > 0.250 ✗") and cell_len(row) <= width
    one = _rendered(sample_table, [_sample(1, 0.25, "so " * 500, "why " * 300)], width=width).splitlines()[-1]
    assert one.endswith("  0.250 ✗") and cell_len(one) <= width


def test_a_short_prompt_leaves_its_room_to_the_response():
    text = _rendered(sample_table, [_sample(1, 1.0, response="r" * 50, prompt="p")], width=80)
    assert "r" * 50 in text


def test_markup_in_samples_is_text():
    assert "[bold]x[/bold]" in _rendered(sample_table, [_sample(1, 1.0, "[bold]x[/bold]")])


def test_a_table_without_answers_has_no_such_column():
    assert "answer" not in _rendered(sample_table, [_sample(1, 1.0, answer=None)])


def test_before_and_now_stand_side_by_side():
    found = pairs([_sample(12, 0.0, "45")], [_sample(12, 1.0, "46")])
    row = _rendered(before_after_table, found).splitlines()[-1]
    assert row.split() == ["12+34=", "45", "46", "0", "✗", ">", "1", "✓"]
