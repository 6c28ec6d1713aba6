"""Checks for batches without `old_logprobs`."""

from hybridflow.errors import ConfigError


def check_one_step(optimizer_steps: int) -> None:
    """Raises `ConfigError` for several optimizer steps on a batch without `old_logprobs`: without them the policy is
    compared with itself, which is right for the first step alone."""
    if optimizer_steps > 1:
        raise ConfigError(
            f"The update takes {optimizer_steps} optimizer steps per batch, and the batch has no old_logprobs.",
            remedy="Add them in the dataflow's step, before the update: batch = batch.join(self.actor.logprobs(batch))."
            " Or take the rollout's (algorithm.old_logprobs=rollout), or use actor.epochs=1 with"
            " actor.minibatch_size=null.",
        )


def check_unlearned(has_learned: bool) -> None:
    """Raises `ConfigError` for a policy that has learned since its samples were drawn, without `old_logprobs`."""
    if has_learned:
        raise ConfigError(
            "The policy has learned since its samples were drawn, and the batch has no old_logprobs.",
            remedy="Call actor.logprobs before the dataflow's first update, imitate or prefer of a step.",
        )


def check_corrected(is_compared: bool) -> None:
    """Raises `ConfigError` for a correction that compares the rollout with the policy, without `old_logprobs`."""
    if is_compared:
        raise ConfigError(
            "algorithm.correction compares the rollout with the policy before the update, and the batch has no"
            " old_logprobs.",
            remedy="Call actor.logprobs in the dataflow's step, and join its answer to the batch.",
        )
