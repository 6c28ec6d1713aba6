"""Rules of `algorithm.correction`: bounds in order, nothing asked for that would not be done, and what it compares."""

import math
from dataclasses import replace

from hybridflow.config.algorithm import Correction, CorrectionLevel, KLPlacement
from hybridflow.config.choices import advantage_name
from hybridflow.config.derived import optimizer_steps_per_step
from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError

KEY = "algorithm.correction"


def is_corrected(correction: Correction) -> bool:
    """Anything is done about the mismatch of rollout and training."""
    return compares(correction) or correction.bypass


def compares(correction: Correction) -> bool:
    """What is done needs the log-probabilities of both, and so `old_logprobs`."""
    none = CorrectionLevel.none
    return correction.weights is not none or correction.reject is not none or correction.veto is not None


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
    elif correction.bypass:
        raise ConfigError(
            f"{KEY}.bypass=true and {KEY}.weights={weights.value}: with bypass the ratio of the loss is already that of"
            " the policy to the rollout, and weights would count it twice.",
            remedy=f"Use {KEY}.weights=none, or {KEY}.bypass=false. For a policy gradient with cut weights and two"
            f" policies: {KEY}.bypass=true with algorithm.policy_loss=cispo.",
        )


def check_old_logprobs(config: Experiment) -> None:
    """GRPO without `old_logprobs`: nothing in the run may need them. Raises `ConfigError` for the first that does."""
    if config.dataflow != "grpo" or config.dataflow_settings.get("recompute_logprobs") is not False:
        return
    algorithm, steps = config.algorithm, optimizer_steps_per_step(config, config.actor)
    recompute = "Use dataflow_settings.recompute_logprobs=true"
    one_step = f"{recompute}, {KEY}.bypass=true, or actor.epochs=1 with actor.minibatch_size=null"
    needs_a_baseline = advantage_name(algorithm.advantage) == "optimal_token_baseline"
    for is_needed, what, remedy in (
        (algorithm.kl.placement is KLPlacement.reward, "algorithm.kl.placement=reward", recompute),
        (compares(algorithm.correction), f"what {KEY} compares", recompute),
        (needs_a_baseline, "algorithm.advantage=optimal_token_baseline", recompute),
        (steps > 1 and not algorithm.correction.bypass, f"{steps} optimizer steps a batch", one_step),
    ):
        if is_needed:
            raise ConfigError(
                "dataflow_settings.recompute_logprobs=false leaves the update without the log-probabilities of the"
                f" policy before it, which are needed for {what}.",
                remedy=f"{remedy}.",
            )


def _check_bounds(correction: Correction) -> None:
    """Bounds are above 0, and the lower ones are lower."""
    if correction.reject is not CorrectionLevel.none:
        implied = replace(correction, reject_lower=correction.reject_lower or 1.0 / max(correction.reject_upper, 1e-9))
    else:
        implied = correction
    for name in ("upper", "lower", "reject_upper", "reject_lower", "veto"):
        value = vars(correction)[name]
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{KEY}.{name}={value:g} is out of range.", remedy="Use a number above 0.")
    for low, high in (("lower", "upper"), ("reject_lower", "reject_upper")):
        smallest, largest = vars(implied)[low], vars(implied)[high]
        if smallest is not None and smallest >= largest:
            raise ConfigError(
                f"{KEY}: nothing lies between {low}={smallest:g} and {high}={largest:g}.",
                remedy=f"Use {KEY}.{high} above 1 and {KEY}.{low} below 1: a ratio of 1 means no mismatch.",
            )
