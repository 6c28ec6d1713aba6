"""What the configuration can choose by name: the function of each method, where it comes from, and how it is used.

A function is called with the arguments that its parameters name (`workers/named_functions.py` lists them).
Parameters with a default are the method's own settings (`algorithm.advantage_settings`, `algorithm.loss_settings`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hybridflow.algorithms.advantages.best_of_group import best_of_group
from hybridflow.algorithms.advantages.decoupled import decoupled
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.greedy_baseline import greedy_baseline
from hybridflow.algorithms.advantages.group_policy_gradient import group_policy_gradient
from hybridflow.algorithms.advantages.group_relative import group_relative
from hybridflow.algorithms.advantages.leave_one_out import leave_one_out
from hybridflow.algorithms.advantages.length_weighted import length_weighted
from hybridflow.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridflow.algorithms.advantages.reinforce import reinforce
from hybridflow.algorithms.losses.cispo import cispo, cispo_clip_fraction
from hybridflow.algorithms.losses.covariance import (
    clip_cov,
    clip_cov_selection,
    kl_cov,
    kl_cov_selection,
    selected_fraction,
)
from hybridflow.algorithms.losses.divergence import (
    cut_fraction,
    dppo_kl,
    dppo_tv,
    outside_fraction,
    within_binary_kl,
    within_total_variation,
)
from hybridflow.algorithms.losses.dro import dro
from hybridflow.algorithms.losses.gmpo import gmpo, gmpo_clip_fraction
from hybridflow.algorithms.losses.gpg import gpg
from hybridflow.algorithms.losses.gspo import gspo, gspo_clip_fraction
from hybridflow.algorithms.losses.kto import prospect
from hybridflow.algorithms.losses.policy import clip_fraction, clipped_surrogate, dual_clip_fraction
from hybridflow.algorithms.losses.preference import (
    hinge_preference,
    length_normalised_preference,
    odds_ratio_preference,
    sigmoid_preference,
    squared_preference,
)
from hybridflow.algorithms.losses.sapo import sapo, sapo_gate

Function = Callable[..., Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Method:
    """One entry. `source` is the paper and the equation."""

    function: Function
    source: str
    whitens: bool = False
    """Advantages: scaled over the batch afterwards, unless `algorithm.whiten_advantages` says otherwise."""

    compares_samples: bool = True
    """Advantages: a prompt's samples are compared with one another, so that one of them says nothing."""

    aggregation: str = "token-mean"
    """Losses: how tokens become one number, unless `algorithm.aggregation` says otherwise."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """What the entry fixes of a function that serves several."""

    prepare: Callable[..., dict[str, Tensor]] | None = None
    """Losses: columns [B, R] that the function wants and that depend on the whole minibatch, of all ranks."""

    watches: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    """Losses: metrics, each a number for the tokens of a micro-batch."""


ADVANTAGES: dict[str, Method] = {
    "gae": Method(gae, "Schulman et al., eq. 16 (arXiv:1506.02438)", whitens=True, compares_samples=False),
    "grpo": Method(group_relative, "DeepSeekMath, sec. 4.1.2 (arXiv:2402.03300)"),
    "dr_grpo": Method(group_relative, "Dr. GRPO, sec. 3.2 (arXiv:2503.20783)", settings={"divide_by_std": False}),
    "rloo": Method(leave_one_out, "RLOO, REINFORCE with a leave-one-out baseline (arXiv:2402.14740)"),
    "remax": Method(greedy_baseline, "ReMax, algorithm 1 (arXiv:2310.10505)", compares_samples=False),
    "reinforce_plus_plus": Method(
        reinforce,
        "REINFORCE++, global advantage normalization (arXiv:2501.03262)",
        whitens=True,
        compares_samples=False,
    ),
    "reinforce_plus_plus_baseline": Method(
        group_relative,
        "REINFORCE++ w/ Baseline: the group's mean, then global normalization (arXiv:2501.03262)",
        whitens=True,
        settings={"divide_by_std": False},
    ),
    "opo": Method(length_weighted, "OPO, optimal reward baseline, responses weighted by length (arXiv:2505.23585)"),
    "gpg": Method(group_policy_gradient, "GPG, eq. 6 to 8 (arXiv:2504.02546)"),
    "grpo_passk": Method(best_of_group, "Tang et al., leave-one-out of the pass@k objective (arXiv:2503.19595)"),
    "gdpo": Method(
        decoupled, "GDPO, normalization of each reward in its group, then of the batch (arXiv:2601.05242)", whitens=True
    ),
    "optimal_token_baseline": Method(
        optimal_token_baseline, "Li et al., optimal token baseline by the logit-gradient proxy (arXiv:2602.07078)"
    ),
}

BY_ROWS = "seq-mean-token-mean"

POLICY_LOSSES: dict[str, Method] = {
    "ppo": Method(
        clipped_surrogate,
        "PPO, eq. 7 (arXiv:1707.06347); clip-higher: DAPO, eq. 10 (arXiv:2503.14476)",
        watches={"actor/pg_clipfrac": clip_fraction, "actor/pg_clipfrac_lower": dual_clip_fraction},
    ),
    "gspo": Method(
        gspo,
        "GSPO, eq. 5, 7 and 14 (arXiv:2507.18071)",
        aggregation=BY_ROWS,
        watches={"actor/pg_clipfrac": gspo_clip_fraction},
    ),
    "cispo": Method(cispo, "CISPO, eq. 4 and 5 (arXiv:2506.13585)", watches={"actor/pg_clipfrac": cispo_clip_fraction}),
    "sapo": Method(
        sapo, "SAPO, eq. 5 and 6 (arXiv:2511.20347)", aggregation=BY_ROWS, watches={"actor/sapo_gate": sapo_gate}
    ),
    "gpg": Method(gpg, "GPG, eq. 5 (arXiv:2504.02546)"),
    "gmpo": Method(
        gmpo,
        "GMPO, eq. 4 (arXiv:2507.20673)",
        aggregation=BY_ROWS,
        watches={"actor/pg_clipfrac": gmpo_clip_fraction},
    ),
    "clip_cov": Method(
        clip_cov,
        "Clip-Cov, eq. 11 and 12 (arXiv:2505.22617)",
        prepare=clip_cov_selection,
        watches={"actor/pg_clipfrac": clip_fraction, "actor/covariance_fraction": selected_fraction},
    ),
    "kl_cov": Method(
        kl_cov,
        "KL-Cov, eq. 13 and 14 (arXiv:2505.22617)",
        prepare=kl_cov_selection,
        watches={"actor/covariance_fraction": selected_fraction},
    ),
    "dppo_tv": Method(
        dppo_tv,
        "DPPO, eq. 13, binary total variation (arXiv:2602.04879)",
        watches={
            "actor/pg_clipfrac": outside_fraction(within_total_variation),
            "actor/pg_clipfrac_lower": cut_fraction(within_total_variation),
        },
    ),
    "dppo_kl": Method(
        dppo_kl,
        "DPPO, eq. 14, binary KL divergence (arXiv:2602.04879)",
        watches={
            "actor/pg_clipfrac": outside_fraction(within_binary_kl),
            "actor/pg_clipfrac_lower": cut_fraction(within_binary_kl),
        },
    ),
    "dro": Method(dro, "DRO-V, eq. 8, the policy's loss (arXiv:2405.19107)"),
}

PREFERENCE_LOSSES: dict[str, Method] = {
    "sigmoid": Method(sigmoid_preference, "DPO, eq. 7 (arXiv:2305.18290); label smoothing: cDPO"),
    "ipo": Method(squared_preference, "IPO, eq. 17 (arXiv:2310.12036)"),
    "hinge": Method(hinge_preference, "SLiC-HF, eq. 2 (arXiv:2305.10425)"),
    "orpo": Method(odds_ratio_preference, "ORPO, eq. 4 to 7 (arXiv:2403.07691)"),
    "simpo": Method(length_normalised_preference, "SimPO, eq. 6 (arXiv:2405.14734)"),
    "kto": Method(prospect, "KTO, sec. 4.1 (arXiv:2402.01306)"),
}
