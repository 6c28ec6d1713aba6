"""The table of an evaluation, from samples.jsonl: scores, best of k, lengths and cut-off responses by data source."""

import math
from collections.abc import Mapping, Sequence

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


def summaries(rows: Sequence[Row]) -> list[dict[str, Json]]:
    """One summary per data source, and one of all rows if there are several sources.

    `mean`, then `pass@k`, the best of k, for k = 2, 4, ... up to the number of samples per prompt; the mean of each of
    several reward functions; tokens of a response; the fraction that was cut off.
    """
    sources = list(dict.fromkeys(str(row.get("source")) for row in rows))
    found = [_summary(source, [row for row in rows if str(row.get("source")) == source]) for source in sources]
    return found if len(found) == 1 else [*found, _summary("all", rows)]


def table_text(found: Sequence[Mapping[str, Json]]) -> str:
    """The summaries as aligned columns."""
    names = list(dict.fromkeys(name for summary in found for name in summary))
    rows = [[formatting.cell(summary.get(name)) for name in names] for summary in found]
    return "\n".join(formatting.columns([names, *rows]))


def _summary(source: str, rows: Sequence[Row]) -> dict[str, Json]:
    groups: dict[tuple[Json, Json], list[float]] = {}
    for row in rows:
        if (score := row.get("score")) is not None:
            groups.setdefault((row.get("source"), row.get("uid")), []).append(float(str(score)))
    scores = [score for group in groups.values() for score in group]
    summary: dict[str, Json] = {"source": source, "prompts": len({(row.get("source"), row.get("uid")) for row in rows})}
    if scores:
        summary["mean"] = _mean(scores)
        samples = min(map(len, groups.values()))
        for k in sorted({2**power for power in range(1, samples.bit_length()) if 2**power < samples} | {samples} - {1}):
            summary[f"pass@{k}"] = _mean([best_of(group, k) for group in groups.values()])
    for part in dict.fromkeys(name for row in rows for name in row if name.startswith("rewards/")):
        summary[part.removeprefix("rewards/")] = _mean(
            [float(str(row[part])) for row in rows if row.get(part) is not None]
        )
    summary["tokens"] = _mean([float(str(row.get("tokens", math.nan))) for row in rows])
    summary["cut_off"] = _mean([float(row.get("is_cut_off") is True) for row in rows])
    return summary


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
