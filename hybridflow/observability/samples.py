"""Samples: one prompt with its response and score, as people and reports read them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hybridflow.observability.jsonlines import Json


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


def pairs(before: Iterable[Sample], now: Iterable[Sample], *, right_at: float) -> list[Pair]:
    """Prompts present on both sides (first response each), most telling first.

    Order: turned from wrong to right, still wrong, right all along, turned wrong; inside each as `now` has them.
    """
    first: dict[tuple[int, str], Sample] = {}
    for sample in before:
        first.setdefault((sample.uid, sample.prompt), sample)
    found: dict[tuple[int, str], Pair] = {}
    for sample in now:
        key = (sample.uid, sample.prompt)
        if key in first and key not in found:
            found[key] = Pair(first[key], sample)
    order = {(False, True): 0, (False, False): 1, (True, True): 2, (True, False): 3}
    return sorted(found.values(), key=lambda p: order[p.before.score >= right_at, p.now.score >= right_at])


def telling(chosen: Sequence[Pair], limit: int, *, right_at: float) -> list[Pair]:
    """At most `limit` pairs of the ordered `chosen`, keeping a place for one that is still wrong, if there is any."""
    if len(chosen) <= limit:
        return list(chosen)
    shown = list(chosen[:limit])
    still_wrong = [pair for pair in chosen[limit:] if pair.now.score < right_at]
    if limit > 1 and still_wrong and all(pair.now.score >= right_at for pair in shown):
        shown[-1] = still_wrong[0]
    return shown


def _number(value: Json) -> float:
    return float(value) if isinstance(value, (int, float, str)) else math.nan
