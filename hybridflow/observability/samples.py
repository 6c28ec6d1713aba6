"""Samples: a prompt with its response and score, for the console, the trackers and the report."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hybridflow.observability.jsonlines import Json

RIGHT_AT = 0.5
"""A response with at least this score counts as correct."""

_LEAST_SHARED = 24
"""A beginning or end that all texts share is left out if it has at least this many characters."""
_CUT = "\u2026"
_SENTENCE_END = re.compile(r"(?<=[.?!\n])\s")

RIGHT_MEANS = f"correct: a score of {RIGHT_AT:g} or more"
"""The explanation of "correct" in tables and reports."""


@dataclass(frozen=True)
class Turn:
    """A message of an episode: a reply of the model, which has the reward after it, or something that the model was
    shown. With some messages a fork begins: a new sequence, which may show earlier replies again.
    """

    role: str
    content: str
    reward: float | None = None
    begins_fork: bool = False

    @property
    def speaker(self) -> Literal["model", "tool", "environment"]:
        """Who said it; what a fork shows again is the environment's."""
        return "model" if self.reward is not None else "tool" if self.role == "tool" else "environment"


@dataclass(frozen=True)
class Sample:
    """One response. `uid` is the position of its prompt in the data stream; `score` is NaN if it was not scored.

    `prompt` is the whole text that the model read; of a conversation, `question` is the user's last turn. `tokens`
    counts those of the response, which `is_cut_off` at the length limit; `rewards` are the scores of several functions,
    by name; `turns` are the replies and answers of an episode, which has no score if it `is_failed`. `response_mask` is
    1 for those of an episode's `response_ids` that the model sampled, and `fork_starts` are the positions at which its
    forks begin; `stderr` is the end of what its program wrote there. A sample that `is_last` was logged because the run
    ended; a run that resumes drops it.
    """

    prompt: str
    response: str
    answer: str | None
    score: float
    uid: int
    split: Literal["train", "eval"] = "train"
    question: str | None = None
    source: str | None = None
    tokens: int | None = None
    is_cut_off: bool | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    response_ids: list[int] | None = None
    response_mask: list[int] | None = None
    fork_starts: list[int] | None = None
    is_last: bool | None = None
    turns: Sequence[Turn] | None = None
    is_failed: bool | None = None
    stderr: str | None = None

    @property
    def asked(self) -> str:
        """The part of the prompt to show: the user's last turn, or the whole text."""
        return self.prompt if self.question is None else self.question

    def row(self, step: int) -> dict[str, Json]:
        """The line of samples.jsonl."""
        fields = asdict(self)
        rewards = {f"rewards/{name}": value for name, value in fields.pop("rewards").items()}
        known = {name: value for name, value in fields.items() if name not in _IF_KNOWN or value is not None}
        return {"step": step, "split": known.pop("split"), **known, **rewards}


_IF_KNOWN = (
    "question", "source", "tokens", "is_cut_off", "response_ids", "response_mask", "fork_starts", "is_last", "turns",
    "is_failed", "stderr",
)  # fmt: skip
"""Fields that a line of samples.jsonl has only if they are known."""


@dataclass(frozen=True)
class Pair:
    """Responses to the same prompt at two steps."""

    before: Sample
    now: Sample


def sample_of_row(row: dict[str, Json]) -> Sample:
    """The sample of a line of samples.jsonl."""
    answer, question, uid = row.get("answer"), row.get("question"), _number(row.get("uid"))
    return Sample(
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer=None if answer is None else str(answer),
        score=_number(row.get("score")),
        uid=int(uid) if math.isfinite(uid) else -1,
        split="eval" if row.get("split") == "eval" else "train",
        question=None if question is None else str(question),
        turns=_turns_of(row.get("turns")),
    )


def _turns_of(found: Json) -> list[Turn] | None:
    """The turns in a line of samples.jsonl; None if there are none."""
    turns = [turn for turn in found if isinstance(turn, dict)] if isinstance(found, list) else []
    return [
        Turn(
            str(turn.get("role", "")),
            str(turn.get("content", "")),
            None if turn.get("reward") is None else _number(turn.get("reward")),
            turn.get("begins_fork") is True,
        )
        for turn in turns
    ] or None


def distinct_parts(texts: Sequence[str]) -> list[str]:
    """The texts without the long beginning and end that all of them share, which hides their differences."""
    several = set(texts)
    if len(several) < 2:
        return list(texts)
    head = _common_beginning(several)
    head = head[: max(head.rfind(" "), head.rfind("\n")) + 1]
    tail = _common_beginning([text[len(head) :][::-1] for text in several])[::-1]
    cut = _SENTENCE_END.search(tail) or re.search(r"\s", tail)
    tail = tail[cut.start() :] if cut else ""
    start, stop = (len(part) if len(part) >= _LEAST_SHARED else 0 for part in (head, tail))
    return [f"{_CUT if start else ''}{text[start : len(text) - stop]}{_CUT if stop else ''}" for text in texts]


def _common_beginning(texts: Collection[str]) -> str:
    first, last = min(texts), max(texts)  # what these two share, all share
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def pairs(before: Iterable[Sample], now: Iterable[Sample]) -> list[Pair]:
    """The first responses to each prompt that occurs in both, in the order of `before`."""
    latest = _first_of_each_prompt(now)
    return [Pair(sample, latest[key]) for key, sample in _first_of_each_prompt(before).items() if key in latest]


def changed(compared: Iterable[Pair]) -> tuple[str, str]:
    """`3 became correct` and `1 became wrong`; for scores that are not verdicts, `3 scored higher` and `1 lower`."""
    scores = [(pair.before.score, pair.now.score) for pair in compared]
    if not are_verdicts(score for both in scores for score in both):
        higher, lower = (sum(sign * (now - before) > 0 for before, now in scores) for sign in (1, -1))
        return f"{higher} scored higher", f"{lower} lower"
    right = sum(before < RIGHT_AT <= now for before, now in scores)
    return f"{right} became correct", f"{sum(now < RIGHT_AT <= before for before, now in scores)} became wrong"


def are_verdicts(scores: Iterable[float]) -> bool:
    """Whether all scores say correct (1) or wrong (0 or -1), or are missing (NaN)."""
    return all(math.isnan(score) or score in (-1.0, 0.0, 1.0) for score in scores)


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
    """The value as a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan
