"""The table of an evaluation, from samples.jsonl: scores, best of k, lengths and cut-off responses by data source."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridflow.observability import formatting
from hybridflow.observability.jsonlines import Json

Row = Mapping[str, Json]
"""A line of samples.jsonl."""


def best_of(scores: Sequence[float], k: int) -> float:
    """The expected best of k scores drawn without replacement: sum_i C(i, k-1) s_i / C(n, k) over ascending s_0, s_1...

    For scores of 0 and 1 with c ones, this is the unbiased estimate of pass@k, 1 - C(n-c, k) / C(n, k)
    (arXiv:2107.03374, eq. 1).
    """
    ascending = sorted(scores)
    return sum(math.comb(place, k - 1) * s for place, s in enumerate(ascending)) / math.comb(len(ascending), k)


@dataclass
class _Source:
    """The numbers that the rows of one data source add to the table."""

    scores: dict[tuple[Json, Json], list[float]] = field(default_factory=dict)
    """By source and prompt."""

    prompts: set[tuple[Json, Json]] = field(default_factory=set)
    parts: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[float] = field(default_factory=list)
    cut_off: list[float] = field(default_factory=list)

    def add(self, row: Row) -> None:
        prompt = row.get("source"), row.get("uid")
        self.prompts.add(prompt)
        if (score := row.get("score")) is not None:
            self.scores.setdefault(prompt, []).append(float(str(score)))
        for name in (name for name in row if name.startswith("rewards/")):
            scored = self.parts.setdefault(name, [])
            scored += [] if row[name] is None else [float(str(row[name]))]
        self.tokens.append(float(str(row.get("tokens", math.nan))))
        self.cut_off.append(float(row.get("is_cut_off") is True))

    def summary(self, source: str) -> dict[str, Json]:
        groups = [*self.scores.values()]
        summary: dict[str, Json] = {"source": source, "prompts": len(self.prompts)}
        if groups:
            summary["mean"] = _mean([score for group in groups for score in group])
            most = min(map(len, groups))
            powers = {2**power for power in range(1, most.bit_length()) if 2**power < most}
            for k in sorted((powers | {most}) - {1}):
                summary[f"pass@{k}"] = _mean([best_of(group, k) for group in groups])
        summary |= {name.removeprefix("rewards/"): _mean(scores) for name, scores in self.parts.items()}
        return summary | {"tokens": _mean(self.tokens), "cut_off": _mean(self.cut_off)}


def summaries(rows: Iterable[Row]) -> list[dict[str, Json]]:
    """One summary per data source, and one of all rows if there are several sources; keeps only numbers of the rows.

    `mean`, then `pass@k`, the best of k, for k = 2, 4, ... up to the number of samples per prompt; the mean of each of
    several reward functions; tokens of a response; the fraction that was cut off.
    """
    everything, sources = _Source(), dict[str, _Source]()
    for row in rows:
        for group in (everything, sources.setdefault(str(row.get("source")), _Source())):
            group.add(row)
    found = [source.summary(name) for name, source in sources.items()]
    return found if len(found) == 1 else [*found, everything.summary("all")]


def table_text(found: Sequence[Mapping[str, Json]]) -> str:
    """The summaries as aligned columns."""
    names = list(dict.fromkeys(name for summary in found for name in summary))
    rows = [[formatting.cell(summary.get(name)) for name in names] for summary in found]
    return "\n".join(formatting.columns([names, *rows]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
