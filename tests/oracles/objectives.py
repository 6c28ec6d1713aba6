"""Losses of a whole batch in plain Python: a number a token, then the aggregate, then the sum of the parts."""

from tests.oracles.losses import clipped_surrogate, clipped_value_loss, kl_divergence
from tests.oracles.reductions import Rows, aggregate

Columns = dict[str, Rows]


def policy_loss(columns: Columns, settings: dict, mode: str, norm_tokens: float) -> float:
    """Surrogate, minus the entropy bonus, plus the KL penalty; the last two where `settings` has them."""

    def over_tokens(number):
        values = [[number(i, t) for t in range(len(row))] for i, row in enumerate(columns["mask"])]
        return aggregate(values, columns["mask"], mode, norm_tokens)

    def surrogate(i, t):
        logprob, old, advantage = (columns[name][i][t] for name in ("logprobs", "old", "advantages"))
        return clipped_surrogate(
            logprob, old, advantage, settings["clip_low"], settings["clip_high"], settings.get("dual_clip")
        )

    loss = over_tokens(surrogate) - settings.get("entropy", 0.0) * over_tokens(lambda i, t: columns["entropy"][i][t])
    if settings.get("kl"):
        estimator = settings["estimator"]
        loss += settings["kl"] * over_tokens(
            lambda i, t: kl_divergence(columns["logprobs"][i][t], columns["ref"][i][t], estimator)
        )
    return loss


def value_loss(columns: Columns, clip: float | None) -> float:
    """The mean over tokens of the critic's error."""
    values = [
        [clipped_value_loss(*numbers, clip) for numbers in zip(*rows, strict=True)]
        for rows in zip(columns["values"], columns["old"], columns["returns"], strict=True)
    ]
    return aggregate(values, columns["mask"], "token-mean", 1.0)
