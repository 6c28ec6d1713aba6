"""Rules of `algorithm.correction`: its bounds are in order, and every setting has an effect."""

from dataclasses import replace

from hybridflow.config.algorithm import Correction, CorrectionLevel, OldLogprobs
from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError

KEY = "algorithm.correction"


def check_correction(config: Experiment) -> None:
    """Raises `ConfigError` for the first rule that the section breaks."""
    correction = config.algorithm.correction
    _check_bounds(correction)
    weights = correction.weights
    if weights is CorrectionLevel.none:
        for name, is_set in (("lower", correction.lower is not None), ("normalize", correction.normalize)):
            if is_set:
                raise ConfigError(
                    f"{KEY}.{name} is set, and there are no weights.", remedy=f"Set {KEY}.weights=token (or sequence)."
                )
    elif config.algorithm.old_logprobs is OldLogprobs.rollout:
        raise ConfigError(
            f"algorithm.old_logprobs=rollout with {KEY}.weights={weights.value}: the ratio of the loss is already that"
            " of the policy to the rollout, and weights would count it twice.",
            remedy=f"Use {KEY}.weights=none, or algorithm.old_logprobs=auto. For a policy gradient with truncated"
            " weights: algorithm.old_logprobs=rollout with algorithm.policy_loss=cispo.",
        )


def _check_bounds(correction: Correction) -> None:
    """Lower bounds are lower."""
    if correction.reject is not CorrectionLevel.none:
        implied = replace(correction, reject_lower=correction.reject_lower or 1.0 / correction.reject_upper)
    else:
        implied = correction
    for low, high in (("lower", "upper"), ("reject_lower", "reject_upper")):
        smallest, largest = vars(implied)[low], vars(implied)[high]
        if smallest is not None and smallest >= largest:
            raise ConfigError(
                f"{KEY}: nothing lies between {low}={smallest:g} and {high}={largest:g}.",
                remedy=f"Use {KEY}.{high} above 1 and {KEY}.{low} below 1: a ratio of 1 means no mismatch.",
            )
