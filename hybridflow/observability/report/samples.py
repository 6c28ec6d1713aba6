"""Samples in the report: evaluation prompts over the run, and the latest training samples."""

import math
from collections.abc import Iterable, Mapping, Sequence

from hybridflow.observability import formatting
from hybridflow.observability.printable import shown, shown_sample
from hybridflow.observability.report.document import html_table
from hybridflow.observability.report.record import RunRecord
from hybridflow.observability.samples import (
    RIGHT_AT,
    RIGHT_MEANS,
    Pair,
    Sample,
    Turn,
    are_verdicts,
    changed,
    distinct_parts,
    followed,
    pairs,
)
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
        text += (
            f'<details id="training-samples"><summary>Training samples, step {max(trained)}</summary>{table}</details>'
        )
    return f"<section><h2>Samples</h2>{text}</section>" if text else ""


def samples_of_runs(runs: Mapping[str, RunRecord]) -> str:
    """The latest responses of several runs to the same evaluation prompts; those they disagree on come first."""
    latest: dict[str, dict[str, Sample]] = {}
    titles: dict[str, str] = {}
    for run, record in runs.items():
        if evaluated := record.samples_of("eval"):
            step = max(evaluated)
            for sample in evaluated[step]:
                latest.setdefault(run, {}).setdefault(sample.prompt, sample)
            titles[run] = f"{run}, step {step}"
    prompts = dict.fromkeys(prompt for found in latest.values() for prompt in found)
    answers = {prompt: [found.get(prompt) for found in latest.values()] for prompt in prompts}
    shared = [prompt for prompt in prompts if sum(sample is not None for sample in answers[prompt]) > 1]
    if not shared:
        said = "No two of these runs have recorded responses to the same evaluation prompt."
        return f'<section><h2>Samples</h2><p class="note">{said}</p></section>'
    shared.sort(key=lambda prompt: _disagreement(answers[prompt]), reverse=True)
    note = f'<p class="note">{len(shared)} evaluation prompts in common; those with different scores come first.</p>'
    questions = distinct_parts([next(each.asked for each in answers[prompt] if each) for prompt in shared])
    asked = dict(zip(shared, questions, strict=True))
    if all(_is_short(sample) for prompt in shared for sample in answers[prompt] if sample):
        rows = [(asked[prompt], answers[prompt]) for prompt in shared[:_FILM_ROWS]]
        return f"<section><h2>Samples</h2>{note}{_chips([*titles.values()], rows)}</section>"
    cards = [_card(asked[prompt], zip(titles.values(), answers[prompt], strict=True)) for prompt in shared]
    return f"<section><h2>Samples</h2>{note}{''.join(cards[:_COMPARED_ROWS])}</section>"


def _disagreement(samples: Sequence[Sample | None]) -> tuple[int, float]:
    scores = [sample.score for sample in samples if sample is not None and not math.isnan(sample.score)]
    return sum(sample is not None for sample in samples), max(scores, default=0.0) - min(scores, default=0.0)


def _evaluations(evaluated: Mapping[int, list[Sample]]) -> str:
    first, last = min(evaluated), max(evaluated)
    if first == last:
        return f'<p class="note">Evaluation, step {first}</p>{_sample_table(evaluated[first][:_FILM_ROWS])}'
    compared = pairs(evaluated[first], evaluated[last])
    better, worse = changed(compared)
    meaning = (
        f" ({RIGHT_MEANS})" if are_verdicts(each.score for pair in compared for each in (pair.before, pair.now)) else ""
    )
    summary = (
        f'<p class="note">Of {len(compared)} recorded evaluation prompts, <b class="right">{better}</b>'
        f' and <b class="wrong">{worse}</b> between step {first} and step {last}{meaning}.</p>'
    )
    if all(_is_short(sample) for rows in evaluated.values() for sample in rows):
        return summary + _film(evaluated)
    compared.sort(key=lambda p: -math.inf if math.isnan(p.now.score) else p.before.score - p.now.score)
    return summary + _comparison(compared[:_COMPARED_ROWS], first, last)


def _asked(samples: Sequence[Sample]) -> list[str]:
    """The prompts to show: of conversations the user's last turn, without what all of them share."""
    return distinct_parts([sample.asked for sample in samples])


def _film(evaluated: Mapping[int, list[Sample]]) -> str:
    """One row per prompt and one column per evaluation, for short responses."""
    steps = _spread(sorted(evaluated), _FILM_STEPS)
    by_step = {step: {(s.uid, s.prompt): s for s in reversed(evaluated[step])} for step in steps}
    chosen = followed(evaluated[steps[0]], _FILM_ROWS)
    rows = [
        (asked, [by_step[step].get((sample.uid, sample.prompt)) for step in steps])
        for sample, asked in zip(chosen, _asked(chosen), strict=True)
    ]
    return _chips([f"step {step}" for step in steps], rows)


def _chips(titles: Sequence[str], samples: Sequence[tuple[str, Sequence[Sample | None]]]) -> str:
    """A row per prompt with short responses, one per title, and the expected answer."""
    rows = []
    for prompt, responses in samples:
        cells = "".join(f"<td>{_answer(each)}</td>" if each else "<td></td>" for each in responses)
        answer = next((each.answer for each in responses if each and each.answer is not None), None)
        rows.append(f"<th>{_text(visible(prompt))}</th>{cells}<td>{_text(answer or '')}</td>")
    return html_table("film", ["prompt", *titles, "answer"], rows)


def _comparison(compared: Sequence[Pair], first: int, last: int) -> str:
    """A card per prompt with its first and last response, for long responses."""
    asked = _asked([pair.now for pair in compared])
    titled = [((f"step {first}", pair.before), (f"step {last}", pair.now)) for pair in compared]
    return "".join(map(_card, asked, titled))


def _card(asked: str, responses: Iterable[tuple[str, Sample | None]]) -> str:
    """A prompt, and long responses to it side by side, each below its title."""
    columns = "".join(
        f'<div><p class="note">{shown(title)} {_score(sample)}</p>'
        f'<div class="text">{_response(sample) or "(empty)"}</div></div>'
        for title, sample in responses
        if sample
    )
    return f'<article class="card pair"><h3>{_text(asked)}</h3><div class="columns">{columns}</div></article>'


def _sample_table(samples: Sequence[Sample]) -> str:
    rows = []
    for sample, asked in zip(samples, _asked(samples), strict=True):
        cells = (_text(asked), _response(sample), _text(sample.answer or ""))
        texts = "".join(f'<td class="text">{cell}</td>' for cell in cells)
        rows.append(f"{texts}<td>{_score(sample)}</td>")
    return html_table("samples", ["prompt", "response", "answer", "score"], rows)


def _response(sample: Sample) -> str:
    """The text of a response, or an episode turn by turn: who speaks, the reward after each reply, and forks."""
    if not sample.turns:
        return _text(sample.response)
    return f'<ol class="turns">{"".join(map(_turn, sample.turns))}</ol>'


def _turn(turn: Turn) -> str:
    more = "" if turn.reward is None else f' <b title="reward">{formatting.short(turn.reward)}</b>'
    if turn.role == "assistant" and turn.speaker != "model":
        more = " (as assistant)"
    fork = '<li class="fork"><span class="note">fork: a new sequence begins</span></li>' if turn.begins_fork else ""
    return (
        f'{fork}<li class="{turn.speaker}"><span class="note">{turn.speaker}{more}</span>'
        f"<div>{_text(turn.content) or '(empty)'}</div></li>"
    )


def _score(sample: Sample) -> str:
    return f'<b class="{_kind(sample)}">{formatting.short(sample.score)}</b>'


def _answer(sample: Sample) -> str:
    return (
        f'<span class="chip {_kind(sample)}" title="score {sample.score:.4g}">{_text(visible(sample.response))}</span>'
    )


def _is_short(sample: Sample) -> bool:
    """Whether the response fits into a cell of a table."""
    return len(sample.response) <= _SHORT_CHARACTERS and len(sample.turns or ()) < 2


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
