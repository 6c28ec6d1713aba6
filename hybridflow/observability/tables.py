"""Sample tables: prompt, response, answer and score, fitted to a terminal, and whole elsewhere."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hybridflow.observability import formatting
from hybridflow.observability.printable import printable
from hybridflow.observability.samples import RIGHT_AT, RIGHT_MEANS, Pair, Sample, Turn, are_verdicts, distinct_parts

_EDGE_SPACES = re.compile(r"^ +| +$")
_ARROWS = str.maketrans({"\n": "\u21b5", "\t": "\u2192"})
_GAP_CELLS = 3
"""Cells between two columns of `box.SIMPLE_HEAD`: padding on both sides of a blank divider."""
_MIN_CELLS = 8
_MOST_PLAIN_CELLS = 160
"""Off a terminal, a table that would be wider is written as one line per text."""

_QUESTION, _PROMPT = "question", "prompt"
_KEPT_PARTS: dict[str, Literal["start", "end"]] = {_QUESTION: "start", _PROMPT: "end", "answer": "start"}
"""Clipping keeps the beginning of a user's question, the end of a plain prompt, and both ends of a response."""


def sample_table(samples: Sequence[Sample], *, console: Console, title: str) -> Group:
    """One row per sample; if scores are verdicts, right responses are green, wrong ones red."""
    marks = are_verdicts(sample.score for sample in samples)
    columns = _prompts(samples) | {"response": [_response(sample, marks=marks) for sample in samples]}
    if any(sample.answer is not None for sample in samples):
        columns["answer"] = [Text("" if sample.answer is None else visible(sample.answer)) for sample in samples]
    scores = [_score(sample.score, console, marks=marks) for sample in samples]
    return _table(_heading(title, marks=marks), columns, scores, console)


def before_after_table(pairs: Sequence[Pair], *, console: Console, title: str) -> Group:
    """One row per prompt, with its response before and now; marked as in `sample_table`."""
    marks = are_verdicts(each.score for pair in pairs for each in (pair.before, pair.now))
    columns = _prompts([pair.now for pair in pairs]) | {
        "before": [_response(pair.before, marks=marks) for pair in pairs],
        "now": [_response(pair.now, marks=marks) for pair in pairs],
    }
    scores = [
        Text(" > ", "dim").join(_score(each.score, console, marks=marks) for each in (pair.before, pair.now))
        for pair in pairs
    ]
    return _table(_heading(title, marks=marks), columns, scores, console)


def _prompts(samples: Sequence[Sample]) -> dict[str, list[Text]]:
    """The users' questions, or prompts that are plain text, without what all of them share."""
    are_chats = any(sample.question is not None for sample in samples)
    texts = distinct_parts([sample.asked for sample in samples])
    return {_QUESTION if are_chats else _PROMPT: [Text(visible(text), "dim") for text in texts]}


def visible(text: str) -> str:
    """The text on one line: spaces at its ends as dots, line ends and tabs as arrows, other controls as codes.

    No control sequence that a model emits reaches the terminal.
    """
    if not text:
        return "(empty)"
    text = _EDGE_SPACES.sub(
        lambda found: "\u00b7" * len(found[0]) if len(found[0]) <= 3 else "\u00b7\u2026\u00b7", text
    )
    return printable(text.replace("\r\n", "\n").translate(_ARROWS))


def clip(text: str, cells: int, *, keep: Literal["start", "end", "both"]) -> str:
    """The text in at most `cells` terminal cells, with an ellipsis where something was cut."""
    if cell_len(text) <= cells:
        return text
    tail = {"start": 0, "end": cells - 1, "both": (cells - 1) // 2}[keep]
    start = set_cell_size(text, cells - 1 - tail)
    return f"{start}\u2026{set_cell_size(text[::-1], tail)[::-1]}"


def _heading(title: str, *, marks: bool) -> list[Text]:
    said = [(title, "bold"), *([(RIGHT_MEANS, "dim")] if marks else [])]
    return [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in said]


def _table(
    heading: Sequence[Text], columns: Mapping[str, list[Text]], scores: Sequence[Text], console: Console
) -> Group:
    others = max([5, *(score.cell_len for score in scores)]) + _GAP_CELLS * len(columns)
    available, width = console.width - others, None
    if not console.is_terminal:
        available = sum(_natural(columns).values())
        width = available + others
        if width > _MOST_PLAIN_CELLS:
            return Group(*heading, *_lines(columns, scores))
    widths = _fitted(columns, available)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", width=width)
    for name in columns:
        table.add_column(name, no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    for index, score in enumerate(scores):
        texts = {name: column[index] for name, column in columns.items()}
        cells = [Text(clip(t.plain, widths[n], keep=_KEPT_PARTS.get(n, "both")), t.style) for n, t in texts.items()]
        table.add_row(*cells, score)
    return Group(*heading, table)


def _lines(columns: Mapping[str, list[Text]], scores: Sequence[Text]) -> Iterator[Text]:
    """Each sample as a paragraph with one whole line per text."""
    width = max(map(len, [*columns, "score"]))
    for place, score in enumerate(scores):
        yield Text("")
        for name, text in [*((name, texts[place]) for name, texts in columns.items()), ("score", score)]:
            yield Text(f"{name:{width}}  {text.plain}", no_wrap=True, overflow="ignore")


def _fitted(columns: Mapping[str, list[Text]], available: int) -> dict[str, int]:
    """The width of each column: its natural width if it fits, otherwise an equal share of the remaining cells."""
    needed = _natural(columns)
    widths: dict[str, int] = {}
    for place, name in enumerate(sorted(needed, key=lambda name: needed[name])):
        fair_share = (available - sum(widths.values())) // (len(needed) - place)
        widths[name] = max(_MIN_CELLS, min(needed[name], fair_share))
    return widths


def _natural(columns: Mapping[str, list[Text]]) -> dict[str, int]:
    """The width at which nothing of a column is cut."""
    return {name: max([_MIN_CELLS, len(name)] + [text.cell_len for text in texts]) for name, texts in columns.items()}


def _response(sample: Sample, *, marks: bool) -> Text:
    turns = sample.turns or ()
    text = visible(sample.response) if len(turns) < 2 else " ".join(map(_turn, turns))
    return Text(text, _style(sample.score, marks=marks))


def _turn(turn: Turn) -> str:
    """The text of a reply; what the model was shown is in brackets: `[env: lower]`, `[tool: 42]`, `[fork: again]`."""
    text = visible(turn.content)
    if turn.speaker == "model":
        return f"[fork] {text}" if turn.begins_fork else text
    kind = "fork" if turn.begins_fork else "tool" if turn.speaker == "tool" else "env"
    return f"[{kind}: {text}]"


def _score(score: float, console: Console, *, marks: bool) -> Text:
    if math.isnan(score):
        return Text("-", "dim")
    right, wrong = ("", "") if console.options.ascii_only or not marks else (" \u2713", " \u2717")
    return Text(formatting.short(score) + (right if score >= RIGHT_AT else wrong), _style(score, marks=marks))


def _style(score: float, *, marks: bool) -> str:
    if not marks:
        return ""
    return "dim" if math.isnan(score) else "green" if score >= RIGHT_AT else "red"
