"""Settings that others replaced."""

from collections.abc import Mapping

REPLACED: Mapping[str, str] = {
    "algorithm.correction.bypass": "Use algorithm.old_logprobs=rollout, which replaced it (use auto instead of false).",
    "dataflow_settings.recompute_logprobs": "Use algorithm.old_logprobs=recompute, which replaced it (use auto"
    " instead of false).",
}
"""What to write instead, by the old key."""


def replacement(key: str) -> str | None:
    """What to write instead of a key that once was one, in whatever section it is looked for."""
    last = key.rpartition(".")[2]
    found = [remedy for old, remedy in REPLACED.items() if old.rpartition(".")[2] == last]
    return REPLACED.get(key) or (found[0] if found else None)
