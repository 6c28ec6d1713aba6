"""Losses for pairs of responses to a prompt, a preferred one (w) and another (l).

`ratios` [N] are sums over a response's tokens of log pi - log pi_ref, `means` [N] the mean log pi of its tokens.
Each function returns one loss per pair, without averaging.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

Pairs = Float[Tensor, " N"]


def sigmoid_preference(
    chosen_ratios: Pairs, rejected_ratios: Pairs, *, beta: float, label_smoothing: float = 0.0, margin: float = 0.0
) -> Pairs:
    """DPO: -(1 - e) log sigmoid(z) - e log sigmoid(-z), with z = beta (h - margin), h = ratio_w - ratio_l.

    DPO, eq. 7 (arXiv:2305.18290); e is the probability that a label is wrong: Mitchell's note on cDPO
    (https://ericmitchell.ai/cdpo.pdf). beta * margin is the offset of ODPO (arXiv:2402.10571).
    """
    logits = beta * (chosen_ratios - rejected_ratios - margin)
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def squared_preference(
    chosen_ratios: Pairs, rejected_ratios: Pairs, chosen_tokens: Pairs, rejected_tokens: Pairs, *, beta: float
) -> Pairs:
    """IPO: (h - 1 / (2 beta))^2, with h = ratio_w / tokens_w - ratio_l / tokens_l.

    IPO, eq. 17 (arXiv:2310.12036), with beta as its tau. Ratios are averaged over tokens, as in the paper's experiments
    according to its authors (in TRL's documentation): with sums, the target would depend on the length.
    """
    gap = chosen_ratios / chosen_tokens.clamp(min=1.0) - rejected_ratios / rejected_tokens.clamp(min=1.0)
    return (gap - 1.0 / (2.0 * beta)).square()


def hinge_preference(chosen_ratios: Pairs, rejected_ratios: Pairs, *, beta: float, margin: float = 0.0) -> Pairs:
    """SLiC's rank calibration: max(0, 1 - beta (h - margin)), with h = ratio_w - ratio_l.

    SLiC-HF, eq. 2 (arXiv:2305.10425), with ratios in place of log-probabilities: RSO's hinge-norm (arXiv:2309.06657).
    """
    return relu(1.0 - beta * (chosen_ratios - rejected_ratios - margin))


def odds_ratio_preference(chosen_means: Pairs, rejected_means: Pairs, *, beta: float) -> Pairs:
    """ORPO: -mean_w - beta log sigmoid(log odds_w - log odds_l), with odds = p / (1 - p), p = exp(mean).

    ORPO, eq. 4 to 7 (arXiv:2403.07691), with beta as its lambda: the mean cross-entropy per token of the chosen
    response, and the odds of both responses.
    """
    log_odds = _log_odds(chosen_means) - _log_odds(rejected_means)
    return -chosen_means - beta * logsigmoid(log_odds)


def length_normalized_preference(
    chosen_means: Pairs, rejected_means: Pairs, *, beta: float, label_smoothing: float = 0.0, margin: float = 0.0
) -> Pairs:
    """SimPO: -(1 - e) log sigmoid(z) - e log sigmoid(-z), with z = beta (mean_w - mean_l - margin).

    SimPO, eq. 6 (arXiv:2405.14734), with margin as its gamma / beta.
    """
    return sigmoid_preference(chosen_means, rejected_means, beta=beta, label_smoothing=label_smoothing, margin=margin)


def _log_odds(log_probability: Pairs) -> Pairs:
    """log p - log(1 - p), with p at most exp(-1e-6)."""
    certain = log_probability.clamp(max=-1e-6)
    return certain - torch.log(-torch.expm1(certain))
