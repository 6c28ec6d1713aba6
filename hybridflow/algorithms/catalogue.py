"""Estimators and losses that the configuration names: the function of each, its source, and how it is used.

A function is called with the arguments that its parameters name (`workers/named_functions.py` lists them).
Parameters with a default are the method's own settings (`algorithm.advantage_settings`, `algorithm.loss_settings`).
Importing this file imports neither the functions nor torch, so that a misspelled name is found immediately.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Method:
    """An estimator or loss. Functions are dotted paths below `hybridflow.algorithms`."""

    target: str | Function
    """The function, or its path; a user's own is the function itself."""

    source: str
    """The paper and the equation."""

    whitens: bool = False
    """Advantages: whiten them over the batch, unless `algorithm.whiten_advantages` is set."""

    compares_samples: bool = True
    """Advantages: compare the samples of a prompt, so that a single sample carries no signal."""

    aggregation: str = "token-mean"
    """Policy losses: the aggregation over tokens, unless `algorithm.aggregation` is set."""

    compares_with_reference: bool = True
    """Preference losses: read the log-probabilities of a reference model."""

    data: str = "preferences"
    """Preference losses: the kind of data that they learn from, as in `Dataflow.data`."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """Fixed arguments, for a function with several entries."""

    prepare: str | None = None
    """Policy losses: a function that computes columns [B, R] for the loss from the whole minibatch of all ranks."""

    watches: Mapping[str, str] = field(default_factory=dict)
    """Policy losses: metrics, and the function that computes each from the tokens of a microbatch."""

    @property
    def function(self) -> Function:
        """The estimator or the loss."""
        return load(self.target) if isinstance(self.target, str) else self.target


def load(path: str) -> Function:
    """Imports a function of this package."""
    module, _, name = path.rpartition(".")
    return vars(importlib.import_module(f"hybridflow.algorithms.{module}"))[name]


ADVANTAGES: dict[str, Method] = {
    "gae": Method(
        "advantages.gae.gae", "Schulman et al., eq. 16 (arXiv:1506.02438)", whitens=True, compares_samples=False
    ),
    "grpo": Method("advantages.group_relative.group_relative", "DeepSeekMath, sec. 4.1.2 (arXiv:2402.03300)"),
    "dr_grpo": Method(
        "advantages.group_relative.group_relative",
        "Dr. GRPO, sec. 3.2 (arXiv:2503.20783)",
        settings={"divide_by_std": False},
    ),
    "rloo": Method(
        "advantages.leave_one_out.leave_one_out", "RLOO, REINFORCE with a leave-one-out baseline (arXiv:2402.14740)"
    ),
    "remax": Method(
        "advantages.greedy_baseline.greedy_baseline", "ReMax, algorithm 1 (arXiv:2310.10505)", compares_samples=False
    ),
    "reinforce_plus_plus": Method(
        "advantages.reinforce.reinforce",
        "REINFORCE++, global advantage normalization (arXiv:2501.03262)",
        whitens=True,
        compares_samples=False,
    ),
    "reinforce_plus_plus_baseline": Method(
        "advantages.group_relative.group_relative",
        "REINFORCE++ w/ Baseline: the group's mean, then global normalization (arXiv:2501.03262)",
        whitens=True,
        settings={"divide_by_std": False},
    ),
    "opo": Method(
        "advantages.length_weighted.length_weighted",
        "OPO, optimal reward baseline, responses weighted by length (arXiv:2505.23585)",
    ),
    "gpg": Method("advantages.group_policy_gradient.group_policy_gradient", "GPG, eq. 6 to 8 (arXiv:2504.02546)"),
    "grpo_passk": Method(
        "advantages.best_of_group.best_of_group",
        "Tang et al., leave-one-out of the pass@k objective (arXiv:2503.19595)",
    ),
    "gdpo": Method(
        "advantages.decoupled.decoupled",
        "GDPO, normalization of each reward in its group, then of the batch (arXiv:2601.05242)",
        whitens=True,
    ),
    "optimal_token_baseline": Method(
        "advantages.optimal_token_baseline.optimal_token_baseline",
        "Li et al., optimal token baseline, using the logit-gradient proxy (arXiv:2602.07078)",
    ),
}

BY_ROWS = "seq-mean-token-mean"
DPPO_WATCHES = {
    "actor/pg_clipfrac": "losses.divergence.dppo_clip_fraction",
    "actor/pg_clipfrac_lower": "losses.divergence.dppo_cut_fraction",
}

POLICY_LOSSES: dict[str, Method] = {
    "ppo": Method(
        "losses.policy.clipped_surrogate",
        "PPO, eq. 7 (arXiv:1707.06347); clip-higher: DAPO, eq. 10 (arXiv:2503.14476)",
        watches={
            "actor/pg_clipfrac": "losses.policy.clip_fraction",
            "actor/pg_clipfrac_lower": "losses.policy.dual_clip_fraction",
        },
    ),
    "gspo": Method(
        "losses.gspo.gspo",
        "GSPO, eq. 5, 7 and 14 (arXiv:2507.18071)",
        aggregation=BY_ROWS,
        watches={"actor/pg_clipfrac": "losses.gspo.gspo_clip_fraction"},
    ),
    "cispo": Method(
        "losses.cispo.cispo",
        "CISPO, eq. 4 and 5 (arXiv:2506.13585)",
        watches={"actor/pg_clipfrac": "losses.cispo.cispo_clip_fraction"},
    ),
    "sapo": Method(
        "losses.sapo.sapo",
        "SAPO, eq. 5 and 6 (arXiv:2511.20347)",
        aggregation=BY_ROWS,
        watches={"actor/sapo_gate": "losses.sapo.sapo_gate"},
    ),
    "gpg": Method("losses.gpg.gpg", "GPG, eq. 5 (arXiv:2504.02546)"),
    "gmpo": Method(
        "losses.gmpo.gmpo",
        "GMPO, eq. 4 (arXiv:2507.20673)",
        aggregation=BY_ROWS,
        watches={"actor/pg_clipfrac": "losses.gmpo.gmpo_clip_fraction"},
    ),
    "clip_cov": Method(
        "losses.covariance.clip_cov",
        "Clip-Cov, eq. 11 and 12 (arXiv:2505.22617)",
        prepare="losses.covariance.clip_cov_selection",
        watches={
            "actor/pg_clipfrac": "losses.policy.clip_fraction",
            "actor/covariance_fraction": "losses.covariance.selected_fraction",
        },
    ),
    "kl_cov": Method(
        "losses.covariance.kl_cov",
        "KL-Cov, eq. 13 and 14 (arXiv:2505.22617)",
        prepare="losses.covariance.kl_cov_selection",
        watches={"actor/covariance_fraction": "losses.covariance.selected_fraction"},
    ),
    "dppo_tv": Method(
        "losses.divergence.dppo",
        "DPPO, eq. 13, binary total variation (arXiv:2602.04879)",
        settings={"binary_kl": False},
        watches=DPPO_WATCHES,
    ),
    "dppo_kl": Method(
        "losses.divergence.dppo",
        "DPPO, eq. 14, binary KL divergence (arXiv:2602.04879)",
        settings={"binary_kl": True},
        watches=DPPO_WATCHES,
    ),
    "dro": Method("losses.dro.dro", "DRO-V, eq. 8, the policy's loss (arXiv:2405.19107)"),
}

PREFERENCE_LOSSES: dict[str, Method] = {
    "sigmoid": Method("losses.preference.sigmoid_preference", "DPO, eq. 7 (arXiv:2305.18290); label smoothing: cDPO"),
    "ipo": Method("losses.preference.squared_preference", "IPO, eq. 17 (arXiv:2310.12036)"),
    "hinge": Method("losses.preference.hinge_preference", "SLiC-HF, eq. 2 (arXiv:2305.10425)"),
    "orpo": Method(
        "losses.preference.odds_ratio_preference", "ORPO, eq. 4 to 7 (arXiv:2403.07691)", compares_with_reference=False
    ),
    "simpo": Method(
        "losses.preference.length_normalized_preference",
        "SimPO, eq. 6 (arXiv:2405.14734)",
        compares_with_reference=False,
    ),
    "kto": Method("losses.kto.prospect", "KTO, sec. 4.1 (arXiv:2402.01306)", data="labelled"),
}
