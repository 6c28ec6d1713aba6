"""Samples: a prompt with its response and score, for the console, the trackers and the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hybridflow.observability.jsonlines import Json

RIGHT_AT = 0.5
"""A response with at least this score counts as correct."""

RIGHT_MEANS = f"correct: a score of {RIGHT_AT:g} or more"
"""The explanation of "correct" in tables and reports."""


@dataclass(frozen=True)
class Sample:
    """One response. `uid` is the position of its prompt in the data stream; `score` is NaN if it was not scored.

    `tokens` counts those of the response, which `is_cut_off` at the length limit; `rewards` are the scores of several
    functions, by name.
    """

    prompt: str
    response: str
    answer: str | None
    score: float
    uid: int
    split: Literal["train", "eval"] = "train"
    source: str | None = None
    tokens: int | None = None
    is_cut_off: bool | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    response_ids: list[int] | None = None

    def row(self, step: int) -> dict[str, Json]:
        """The line of samples.jsonl."""
        fields = asdict(self)
        rewards = {f"rewards/{name}": value for name, value in fields.pop("rewards").items()}
        known = {name: value for name, value in fields.items() if name not in _IF_KNOWN or value is not None}
        return {"step": step, "split": known.pop("split"), **known, **rewards}


_IF_KNOWN = ("source", "tokens", "is_cut_off", "response_ids")
"""Fields that a line of samples.jsonl has only if they are known."""


@dataclass(frozen=True)
class Pair:
    """Responses to the same prompt at two steps."""

    before: Sample
    now: Sample


def sample_of_row(row: dict[str, Json]) -> Sample:
    """The sample of a line of samples.jsonl."""
    answer, score = row.get("answer"), row.get("score")
    return Sample(
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer=None if answer is None else str(answer),
        score=_number(score),
        uid=int(_number(row.get("uid", -1))),
        split="eval" if row.get("split") == "eval" else "train",
    )


def pairs(before: Iterable[Sample], now: Iterable[Sample]) -> list[Pair]:
    """The first responses to each prompt that occurs in both, in the order of `before`."""
    latest = _first_of_each_prompt(now)
    return [Pair(sample, latest[key]) for key, sample in _first_of_each_prompt(before).items() if key in latest]


def turned(compared: Iterable[Pair]) -> tuple[int, int]:
    """The number of pairs that became correct, and of those that became wrong."""
    scores = [(pair.before.score, pair.now.score) for pair in compared]
    right = sum(before < RIGHT_AT <= now for before, now in scores)
    return right, sum(now < RIGHT_AT <= before for before, now in scores)


def followed(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples to follow over a run: wrong ones and one right one, in their order."""
    right = [place for place, sample in enumerate(samples) if sample.score >= RIGHT_AT]
    wrong = [place for place, sample in enumerate(samples) if not sample.score >= RIGHT_AT]
    chosen = wrong[: limit - 1] + right[:1]
    chosen += (wrong[limit - 1 :] + right[1:])[: limit - len(chosen)]
    return [samples[place] for place in sorted(chosen)]


def _first_of_each_prompt(samples: Iterable[Sample]) -> dict[tuple[int, str], Sample]:
    found: dict[tuple[int, str], Sample] = {}
    for sample in samples:
        found.setdefault((sample.uid, sample.prompt), sample)
    return found


def _number(value: Json) -> float:
    return float(value) if isinstance(value, (int, float, str)) else math.nan
