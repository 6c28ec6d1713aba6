"""Settings that others took the place of."""

from collections.abc import Mapping

REPLACED: Mapping[str, str] = {
    "algorithm.correction.bypass": "Use algorithm.old_logprobs=rollout, which took its place (auto for false).",
    "dataflow_settings.recompute_logprobs": "Use algorithm.old_logprobs=recompute, which took its place (auto for"
    " false).",
}
"""What to write instead, by the key of old."""


def replacement(key: str) -> str | None:
    """What to write instead of a key that once was one, in whatever section it is looked for."""
    last = key.rpartition(".")[2]
    found = [remedy for old, remedy in REPLACED.items() if old.rpartition(".")[2] == last]
    return REPLACED.get(key) or (found[0] if found else None)
