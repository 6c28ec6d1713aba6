"""Values of `algorithm.*` that are chosen by name, and their names in other systems."""

from collections.abc import Collection, Mapping
from pathlib import PurePath

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

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


_SYNONYMS = {
    "algorithm.advantage": ADVANTAGE_SYNONYMS,
    "algorithm.policy_loss": POLICY_LOSS_SYNONYMS,
    "algorithm.preference.loss": PREFERENCE_SYNONYMS,
}


def chosen(name: str, key: str, choices: Collection[str]) -> str:
    """The choice behind a name or a synonym; a function of the user's own (`file.py:f`, `my_package.f`) is itself."""
    if is_own(name):
        return name
    found = _SYNONYMS[key].get(name, name)
    if found not in choices:
        raise ConfigError(
            f"{key}={name} is unknown.",
            remedy=f"{did_you_mean(name, (*choices, *_SYNONYMS[key]))}Choose from: {', '.join(choices)}; or name a"
            " function of your own: file.py:f or my_package.f.",
        )
    return found


def is_own(name: str) -> bool:
    """A function of the user's own: `file.py:f`, or a dotted path."""
    return ":" in name or PurePath(name).suffix != ""
