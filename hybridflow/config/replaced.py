"""Settings that others took the place of."""

from collections.abc import Mapping

REPLACED: Mapping[str, str] = {
    "algorithm.correction.bypass": "Use algorithm.old_logprobs=rollout, which took its place (auto for false).",
    "dataflow_settings.recompute_logprobs": "Use algorithm.old_logprobs=recompute, which took its place (auto for"
    " false).",
}
"""What to write instead, by the key of old."""
