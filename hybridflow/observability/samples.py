"""Samples: one prompt with its response and score, as people and reports read them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hybridflow.observability.jsonlines import Json

RIGHT_AT = 0.5
"""From this score on a response counts as right, also where scores are graded."""

RIGHT_MEANS = f"right: a score of {RIGHT_AT:g} or more"
"""What `right` means, beside headings."""


@dataclass(frozen=True)
class Sample:
    """One response. `uid` is the prompt's place in its data stream; `score` is NaN where no function scored it."""

    prompt: str
    response: str
    answer: str | None
    score: float
    uid: int
    split: Literal["train", "eval"] = "train"

    def row(self, step: int) -> dict[str, Json]:
        """The line of samples.jsonl."""
        fields = asdict(self)
        return {"step": step, "split": fields.pop("split"), **fields}


@dataclass(frozen=True)
class Pair:
    """The same prompt answered at two steps."""

    before: Sample
    now: Sample

    @property
    def turned_right(self) -> bool:
        """Wrong before, right now."""
        return self.before.score < RIGHT_AT <= self.now.score

    @property
    def turned_wrong(self) -> bool:
        """Right before, wrong now."""
        return self.now.score < RIGHT_AT <= self.before.score


def sample_of_row(row: dict[str, Json]) -> tuple[int, Sample]:
    """The step and the sample of a line of samples.jsonl."""
    answer, score = row.get("answer"), row.get("score")
    return int(_number(row.get("step"))), Sample(
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer=None if answer is None else str(answer),
        score=_number(score) if score is not None else math.nan,
        uid=int(_number(row.get("uid", -1))),
        split="eval" if row.get("split") == "eval" else "train",
    )


def pairs(before: Iterable[Sample], now: Iterable[Sample]) -> list[Pair]:
    """Prompts present on both sides, the first response of each, in the order of `before`."""
    latest = _first_of_each_prompt(now)
    return [Pair(sample, latest[key]) for key, sample in _first_of_each_prompt(before).items() if key in latest]


def watched(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples to follow over a run: wrong ones, and one that is right, in their order."""
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
