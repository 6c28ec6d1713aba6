"""The metrics before the end: numbers that are not finite, that explode, or that show that nothing is learned."""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from hybridflow.doctor.finding import Finding, ok, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.observability.diagnosis import Diagnosis
from hybridflow.observability.formatting import counted, short
from hybridflow.observability.jsonlines import Json
from hybridflow.observability.trackers.jsonl import METRICS_FILE

_WATCHED = ("loss", "grad_norm", "ppo_kl", "score/mean", "reward_kl_penalty", "entropy")
_LAST_STEPS = 20
_LEAST_STEPS = 5
_EXPLODED = 20.0
"""How many times the median of earlier steps a value must be."""

_LEAST_VALUE = 1.0
"""Smaller values fluctuate by large factors: losses near 0."""

_LOWER = (
    "Lower actor.optimizer.learning_rate (critic.optimizer.learning_rate for critic/...), or the clipping of gradients"
    " (max_grad_norm), before you resume."
)


def numbers(run: RunDirectory) -> Iterator[Finding]:
    """Findings on the metrics of the last steps."""
    lines = _lines(run)
    if lines > len(run.rows):
        yield warning(
            "metrics",
            f"{counted(lines - len(run.rows), 'line')} of {METRICS_FILE} cannot be read",
        )
    if not run.rows:
        yield ok("metrics", "no step was recorded")
        return
    steps = sorted(run.rows)[-_LAST_STEPS:]
    names = [name for name in run.rows[steps[-1]] if name.endswith(_WATCHED)]
    wrong = [*_not_finite(run, steps, names), *_exploded(run, names)]
    if wrong:
        yield warning("metrics", "; ".join(wrong), _LOWER)
    signs = _signs(run)
    for found, remedy in signs:
        yield warning("learning", found, remedy)
    if not wrong and not signs:
        headline = next((name for name in ("critic/score/mean", "train/loss") if name in run.rows[steps[-1]]), None)
        value = f", {headline} {short(_number(run.rows[steps[-1]][headline]))}" if headline else ""
        yield ok("metrics", f"{_trained(run)}, all finite and none exploding{value}")


def _trained(run: RunDirectory) -> str:
    """The steps with metrics, in words; a run that was resumed elsewhere begins with a later one."""
    first, last = min((step for step in run.rows if step), default=0), max(run.rows)
    return counted(last, "step") if first <= 1 else f"steps {first} to {last}"


def _lines(run: RunDirectory) -> int:
    """The number of lines; the last one of a live run may not be whole yet."""
    path = run.path / METRICS_FILE
    text = path.read_bytes() if path.is_file() else b""
    return text.count(b"\n") if run.is_alive else len(text.splitlines())


def _not_finite(run: RunDirectory, steps: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        bad = [step for step in steps if name in run.rows[step] and math.isnan(_number(run.rows[step][name]))]
        if bad:
            yield f"{name} is NaN or infinite in step {bad[0]}" + (f" and {len(bad) - 1} later ones" if bad[1:] else "")


def _exploded(run: RunDirectory, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        values = [(step, abs(_number(row.get(name)))) for step, row in sorted(run.rows.items())]
        finite = [each for each in values if math.isfinite(each[1])]
        if len(finite) <= _LEAST_STEPS:
            continue
        step, last = finite[-1]
        usual = median(value for _, value in finite[:-1])
        if last > max(_EXPLODED * usual, _LEAST_VALUE):
            yield f"{name} was {short(last)} in step {step}, and {short(usual)} usually"


def _signs(run: RunDirectory) -> list[tuple[str, str]]:
    """Signs of the latest steps that nothing is learned."""
    diagnosis = Diagnosis()
    for step, row in sorted(run.rows.items()):
        diagnosis.update(step, {name: value for name in row if not math.isnan(value := _number(row[name]))})
    return [(advice.message.rstrip("."), advice.remedy) for advice in diagnosis.standing()]


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
