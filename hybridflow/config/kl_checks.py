"""Rules of `algorithm.kl`, the divergence from the reference model."""

from hybridflow.config.algorithm import KLPlacement
from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError

KEY = "algorithm.kl"
_WITHOUT_A_SLOPE = ("k1", "kl")


def check_kl(config: Experiment) -> None:
    """Raises `ConfigError` for the first rule that the section breaks."""
    kl = config.algorithm.kl
    if kl.placement is KLPlacement.loss and kl.estimator in _WITHOUT_A_SLOPE and not kl.allow_k1_loss:
        raise ConfigError(
            f"{KEY}.placement=loss with {KEY}.estimator={kl.estimator} does not hold the policy near its reference: the"
            " gradient of k1 is that of the log-probability alone, which is 0 on average whatever the reference says.",
            remedy=f"Leave {KEY}.estimator out (k3+), or use k2, k1+ or k3+, whose gradient is that of the divergence."
            f" {KEY}.allow_k1_loss=true permits k1 all the same.",
        )
    if kl.target is not None and kl.placement is not KLPlacement.reward:
        raise ConfigError(
            f"{KEY}.target={kl.target:g} adapts the KL penalty in the reward, but {KEY}.placement={kl.placement.name}.",
            remedy=f"Use {KEY}.placement=reward, or leave the target out.",
        )
    sequences = config.data.batch_size * config.rollout.samples_per_prompt
    if kl.target is not None and 0.2 * sequences >= kl.horizon:
        raise ConfigError(
            f"{KEY}.horizon={kl.horizon} is too short for {sequences} sequences per step:"
            " one step could turn the coefficient negative.",
            remedy=f"Use {10 * sequences} or more.",
        )
