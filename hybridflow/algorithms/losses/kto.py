"""Kahneman-Tversky optimization: a loss for single responses, labeled as liked or not."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.masked import Scalar

Responses = Float[Tensor, " N"]


def prospect(
    ratios: Responses,
    is_chosen: Bool[Tensor, " N"],
    anchor: Scalar,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Responses:
    """KTO: w_d (1 - sigmoid(beta (ratio - z0))) for liked responses, w_u (1 - sigmoid(beta (z0 - ratio))) for others.

    KTO, the loss of sec. 4.1 (arXiv:2402.01306): lambda_y - v. `ratios` [N] are sums over a response's tokens of
    log pi - log pi_ref, and the anchor z0 is `reference_point`. One loss per response; not averaged.
    """
    gain = torch.where(is_chosen, ratios - anchor, anchor - ratios)
    weight = torch.where(is_chosen, desirable_weight, undesirable_weight)
    return weight * (1.0 - torch.sigmoid(beta * gain))


def reference_point(ratio_sum: Scalar, count: Scalar) -> Scalar:
    """z0 = max(0, mean ratio of mismatched responses), from the sum and number of ratios in the optimizer step.

    KTO, sec. 4.1 (arXiv:2402.01306): an estimate of KL(pi || pi_ref) from responses to other prompts. No gradient.
    """
    return (ratio_sum / count.clamp(min=1.0)).clamp(min=0.0).detach()
