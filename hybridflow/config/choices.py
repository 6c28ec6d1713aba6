"""Names of what the configuration can choose, and what other systems call the same."""

from collections.abc import Mapping
from pathlib import PurePath

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

ADVANTAGES = (
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_passk",
    "gdpo",
    "optimal_token_baseline",
)
"""Estimators of the advantage; `algorithms/catalogue.py` has their functions."""

POLICY_LOSSES = (
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "gmpo",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
"""Losses of the policy; `algorithms/catalogue.py` has their functions."""

PAIR_LOSSES = ("sigmoid", "ipo", "hinge", "orpo", "simpo")
"""Losses of a pair of responses, of which one is preferred."""

LOSSES_WITHOUT_REFERENCE = ("orpo", "simpo")
"""Those that compare the policy with no reference model."""

PREFERENCE_LOSSES = (*PAIR_LOSSES, "kto")
"""Those, and the one of single responses that are liked or not."""

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL_VALUES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_ESTIMATORS = (*_KL_VALUES, *(f"{value}+" for value in _KL_VALUES))
"""Estimators of the divergence; with a `+`, those whose gradient is that of k2."""

ADVANTAGE_SYNONYMS: Mapping[str, str] = {
    "group_norm": "grpo",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "optimal_token": "optimal_token_baseline",
}
POLICY_LOSS_SYNONYMS: Mapping[str, str] = {"vanilla": "ppo", "geo_mean": "gmpo"}
PREFERENCE_SYNONYMS: Mapping[str, str] = {"dpo": "sigmoid"}


def chosen(name: str, key: str, choices: tuple[str, ...], synonyms: Mapping[str, str]) -> str:
    """The choice behind a name or a synonym; a function of the user's own (`file.py:f`, `my_package.f`) is itself."""
    if is_own(name):
        return name
    found = synonyms.get(name, name)
    if found not in choices:
        raise ConfigError(
            f"{key}={name} is unknown.",
            remedy=f"{did_you_mean(name, (*choices, *synonyms))}Choose from: {', '.join(choices)}; or name a function"
            " of your own: file.py:f or my_package.f.",
        )
    return found


def advantage_name(name: str) -> str:
    """The estimator that `algorithm.advantage` names."""
    return chosen(name, "algorithm.advantage", ADVANTAGES, ADVANTAGE_SYNONYMS)


def policy_loss_name(name: str) -> str:
    """The loss that `algorithm.policy_loss` names."""
    return chosen(name, "algorithm.policy_loss", POLICY_LOSSES, POLICY_LOSS_SYNONYMS)


def preference_loss_name(name: str) -> str:
    """The loss that `algorithm.preference.loss` names."""
    return chosen(name, "algorithm.preference.loss", PREFERENCE_LOSSES, PREFERENCE_SYNONYMS)


def is_own(name: str) -> bool:
    """A function of the user's own: `file.py:f`, or a dotted path."""
    return ":" in name or PurePath(name).suffix != ""
