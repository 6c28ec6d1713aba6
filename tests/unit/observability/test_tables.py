"""Samples and their tables."""

import json
import math
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybridflow.observability.samples import Sample, Turn, changed, distinct_parts, followed, pairs, sample_of_row
from hybridflow.observability.tables import before_after_table, clip, sample_table, visible


def _sample(uid, score, response="46", prompt=None, answer: str | None = "46", split="eval", question=None):
    return Sample(prompt or f"{uid}+34=", response, answer, score, uid, split, question)


TERMINAL = {"force_terminal": True, "color_system": None, "soft_wrap": False}


def _rendered(make, *arguments, width=80, soft_wrap=True, **options):
    console = Console(file=StringIO(), width=width, soft_wrap=soft_wrap, **options)
    console.print(make(*arguments, console=console, title="samples  step 5"))
    return console.file.getvalue()


def test_a_sample_survives_its_row():
    sample = Sample("1+1=", "2", None, 1.0, 7, "train", "1 + 1?")
    assert sample_of_row(sample.row(12)) == sample
    assert list(sample.row(12)) == ["step", "split", "prompt", "response", "answer", "score", "uid", "question"]
    for odd in (None, "<b>", [1], 10**400):
        read = sample_of_row({"step": 1, "score": odd, "uid": odd})
        assert math.isnan(read.score) and read.uid == -1


EPISODE = [
    Turn("assistant", "left ", 0.0),
    Turn("user", "You are at 1."),
    Turn("assistant", "add(1, 2)", 0.0),
    Turn("tool", "3"),
    Turn("assistant", "", 0.5),
    Turn("user", "Summarize.", begins_fork=True),
    Turn("assistant", "left", 1.0),
    Turn("assistant", "right", 0.0, begins_fork=True),
]


def test_the_turns_of_an_episode_survive_its_row():
    sample = Sample("go", "left", None, 1.0, 7, turns=EPISODE)
    assert sample_of_row(json.loads(json.dumps(sample.row(1)))) == sample


def test_a_table_shows_which_text_is_the_models_and_where_forks_begin():
    sample = Sample("go", "never shown", None, 1.0, 7, turns=EPISODE)
    shown = "left· [env: You are at 1.] add(1, 2) [tool: 3] (empty) [fork: Summarize.] left [fork] right"
    assert shown in _rendered(sample_table, [sample])
    narrow = _rendered(sample_table, [sample], width=40, **TERMINAL)
    assert all(cell_len(line) <= 40 for line in narrow.splitlines()) and "left· [env" in narrow and "…" in narrow
    alone = Sample("go", "left<eos>", None, 1.0, 7, turns=EPISODE[:1])
    assert "left<eos>" in _rendered(sample_table, [alone])


def test_pairs_match_prompts_and_take_the_first_response_of_each():
    before = [_sample(1, 0.0), _sample(2, 1.0), _sample(3, 0.0)]
    now = [_sample(2, 0.0), _sample(1, 1.0), _sample(1, 0.0), _sample(9, 1.0)]
    found = pairs(before, now)
    assert [(pair.before.score, pair.now.score, pair.now.uid) for pair in found] == [(0.0, 1.0, 1), (1.0, 0.0, 2)]
    assert changed(found) == ("1 became correct", "1 became wrong")
    assert changed(found[:1]) == ("1 became correct", "0 became wrong")
    assert changed(pairs(before, [_sample(1, 0.1), _sample(2, 0.3)])) == ("1 scored higher", "1 lower")


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


def test_scores_that_are_no_verdicts_have_no_marks():
    text = _rendered(sample_table, [_sample(1, 3.0), _sample(2, 0.1)])
    assert text.endswith(" 0.100\n") and not set("\u2713\u2717") & set(text) and "correct" not in text


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
    row = _rendered(before_after_table, found, width=width, **TERMINAL).splitlines()[-1]
    assert row.endswith("  0 > 0.250") and cell_len(row) <= width
    long = [_sample(1, 0.25, "so " * 500, "why " * 300 + "QUESTION", answer="because " * 9)]
    lines = _rendered(sample_table, long, width=width, **TERMINAL).splitlines()
    assert lines[-1].endswith("  0.250") and "QUESTION" in lines[-1] and len(lines) == 4
    assert max(map(cell_len, lines)) <= width


def test_before_and_now_stand_side_by_side():
    found = pairs([_sample(12, 0.0, "45")], [_sample(12, 1.0, "46")])
    row = _rendered(before_after_table, found).splitlines()[-1]
    assert row.split() == ["12+34=", "45", "46", "0", "✗", ">", "1", "✓"]


def test_off_a_terminal_nothing_is_cut_and_wide_samples_have_a_line_per_text():
    text, short = "so " * 60 + "end", [_sample(1, 0.25, "r" * 60, "p" * 60)]
    row = _rendered(sample_table, short, width=80).splitlines()[-1]
    assert row.split() == ["p" * 60, "r" * 60, "46", "0.250"]
    found = pairs([_sample(1, 0.0, text)], [_sample(1, 1.0, "a\nb")])
    assert _rendered(before_after_table, found, width=80).splitlines()[2:] == [
        "",
        "prompt  1+34=",
        f"before  {text}",
        "now     a\u21b5b",
        "score   0 \u2717 > 1 \u2713",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_of_a_conversation_the_head_of_the_users_turn_is_shown_without_what_all_share(width):
    end = ' Let us think step by step and put the final answer after "####".'
    asked = [
        f"{name} sells {n} clips to friends, and half as many in May. How many?{end}" for n, name in enumerate("AB")
    ]
    chats = [
        _sample(n, 0.0, prompt=f"system\nuser\n{text}\nassistant\n", question=text) for n, text in enumerate(asked)
    ]
    lines = _rendered(sample_table, chats, width=width, **TERMINAL).splitlines()
    assert lines[2].startswith("question ")
    assert [line[:9] for line in lines[4:]] == ["A sells 0", "B sells 1"] and "####" not in "".join(lines)
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["12+34=", "12+4="], ["12+34=", "12+4="]),
        (["Solve this problem step by step: 1+1", "Solve this problem step by step: 2"], ["\u20261+1", "\u20262"]),
        (["same " * 20] * 3, ["same " * 20] * 3),
        (["abcdefghijklmnopqrstuvwxyz1", "abcdefghijklmnopqrstuvwxyz2"], None),  # no part of a word is left out
        (["a" + " b" * 30, " b" * 30], ["a\u2026", "\u2026"]),
        (
            [f"Add {x} pears. Give only the final number, please." for x in "12"],
            ["Add 1 pears.\u2026", "Add 2 pears.\u2026"],
        ),
        ([], []),
    ],
)
def test_only_long_shared_words_are_left_out(texts, parts):
    assert distinct_parts(texts) == (texts if parts is None else parts)
