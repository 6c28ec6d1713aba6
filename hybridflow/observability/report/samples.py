"""Samples in the report: evaluation prompts over the run, and the latest training samples."""

import math
from collections.abc import Mapping, Sequence

from hybridflow.observability import formatting
from hybridflow.observability.printable import shown_sample
from hybridflow.observability.report.record import RunRecord
from hybridflow.observability.samples import RIGHT_AT, RIGHT_MEANS, Pair, Sample, followed, pairs, turned
from hybridflow.observability.tables import visible

_SHORT_CHARACTERS = 24
_FILM_STEPS = 8
_FILM_ROWS = 14
_COMPARED_ROWS = 8
_TRAIN_ROWS = 10
_MAX_CHARACTERS = 1500


def samples_section(record: RunRecord) -> str:
    """Evaluation prompts, then the latest training samples; empty if no samples were kept."""
    evaluated, trained = record.samples_of("eval"), record.samples_of("train")
    text = _evaluations(evaluated) if evaluated else ""
    if trained:
        table = _sample_table(trained[max(trained)][:_TRAIN_ROWS])
        text += f"<details><summary>Training samples, step {max(trained)}</summary>{table}</details>"
    return f"<section><h2>Samples</h2>{text}</section>" if text else ""


def _evaluations(evaluated: Mapping[int, list[Sample]]) -> str:
    first, last = min(evaluated), max(evaluated)
    if first == last:
        return f'<p class="note">Evaluation, step {first}</p>{_sample_table(evaluated[first][:_FILM_ROWS])}'
    compared = pairs(evaluated[first], evaluated[last])
    right, wrong = turned(compared)
    summary = (
        f'<p class="note">Of {len(compared)} recorded evaluation prompts, <b class="right">{right} became correct</b>'
        f' and <b class="wrong">{wrong} became wrong</b> between step {first} and step {last} ({RIGHT_MEANS}).</p>'
    )
    if all(len(sample.response) <= _SHORT_CHARACTERS for rows in evaluated.values() for sample in rows):
        return summary + _film(evaluated)
    compared.sort(key=lambda p: -math.inf if math.isnan(p.now.score) else p.before.score - p.now.score)
    return summary + _comparison(compared[:_COMPARED_ROWS], first, last)


def _film(evaluated: Mapping[int, list[Sample]]) -> str:
    """One row per prompt and one column per evaluation, for short responses."""
    steps = _spread(sorted(evaluated), _FILM_STEPS)
    by_step = {step: {(s.uid, s.prompt): s for s in reversed(evaluated[step])} for step in steps}
    rows = []
    for sample in followed(evaluated[steps[0]], _FILM_ROWS):
        cells = [by_step[step].get((sample.uid, sample.prompt)) for step in steps]
        shown = "".join(f"<td>{_answer(cell)}</td>" if cell else "<td></td>" for cell in cells)
        answer = f"<td>{_text(sample.answer)}</td>" if sample.answer is not None else "<td></td>"
        rows.append(f"<tr><th>{_text(visible(sample.prompt))}</th>{shown}{answer}</tr>")
    head = "".join(f"<th>step {step}</th>" for step in steps)
    return (
        f'<div class="card scroll"><table class="film"><thead><tr><th>prompt</th>{head}<th>answer</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _comparison(compared: Sequence[Pair], first: int, last: int) -> str:
    """A card per prompt with its first and last response, for long responses."""
    cards = [
        f'<article class="card pair"><h3>{_text(pair.now.prompt)}</h3><div class="columns">'
        f"{_response(pair.before, f'step {first}')}{_response(pair.now, f'step {last}')}</div></article>"
        for pair in compared
    ]
    return "".join(cards)


def _response(sample: Sample, label: str) -> str:
    return (
        f'<div><p class="note">{label} {_score(sample)}</p>'
        f'<div class="text">{_text(sample.response) or "(empty)"}</div></div>'
    )


def _sample_table(samples: Sequence[Sample]) -> str:
    rows = []
    for sample in samples:
        texts = "".join(
            f'<td class="text">{_text(text)}</td>' for text in (sample.prompt, sample.response, sample.answer or "")
        )
        rows.append(f"<tr>{texts}<td>{_score(sample)}</td></tr>")
    return (
        '<div class="card scroll"><table class="samples"><thead><tr><th>prompt</th><th>response</th><th>answer</th>'
        f"<th>score</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _score(sample: Sample) -> str:
    return f'<b class="{_kind(sample)}">{formatting.short(sample.score)}</b>'


def _answer(sample: Sample) -> str:
    return (
        f'<span class="chip {_kind(sample)}" title="score {sample.score:.4g}">{_text(visible(sample.response))}</span>'
    )


def _kind(sample: Sample) -> str:
    return "unscored" if math.isnan(sample.score) else "right" if sample.score >= RIGHT_AT else "wrong"


def _spread(steps: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the steps, evenly spaced, with the first and the last."""
    last, gaps = len(steps) - 1, min(len(steps), limit) - 1
    return [steps[round(place * last / gaps)] for place in range(gaps + 1)]


def _text(text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        text = f"{text[:half]} \u2026 {text[-half:]}"
    return shown_sample(text)
