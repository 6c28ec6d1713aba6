"""Checks of what an update compares: batches without `old_logprobs`, and a rollout that disagrees with training."""

from hybridflow.batch.wire import Meta
from hybridflow.errors import ConfigError, StaleWeightsError


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


def check_temperature(meta: Meta, temperature: float) -> None:
    """Raises `StaleWeightsError` for a batch sampled at another temperature than that of the policy's training."""
    if (drawn_at := meta.get("temperature", temperature)) != temperature:
        raise StaleWeightsError(
            f"The samples were drawn at temperature {drawn_at}, and the policy is trained at {temperature}.",
            remedy='Train on samples of rollout.generate(prompts, purpose="train"), or set'
            " rollout.eval_sampling.temperature to that of rollout.sampling. In a dataflow of your own that trains on"
            " its samples, annotate `rollout: Generates`, without None.",
        )


def check_rollout_agrees(difference: float, meta: Meta, bound: float, *, temperature: float) -> None:
    """Raises `StaleWeightsError` where rollout and training give one token log-probabilities too far apart.

    `meta` is the batch's, `temperature` the policy's, and `bound` holds at temperature 1: logits are divided by the
    temperature, and with them their rounding errors, so below 1 the bound is divided by it too.
    """
    bound /= min(1.0, temperature)
    if difference <= bound:
        return
    found = (
        f"Rollout and training disagree: the log-probability of one token differs by {difference:.2e}, more than"
        f" {bound:g}"
    )
    if meta.get("is_restricted"):
        raise StaleWeightsError(
            f"{found}. The samples were drawn with top_p or top_k, so the rollout's log-probabilities are renormalised"
            " over the tokens that could be drawn; training's are over all tokens.",
            remedy='Train on samples of rollout.generate(prompts, purpose="train"), or set'
            " rollout.eval_sampling.top_p=1 and rollout.eval_sampling.top_k=0.",
        )
    at = "" if temperature >= 1.0 else f" (rollout.max_logprob_difference, divided by the temperature {temperature:g})"
    raise StaleWeightsError(
        f"{found}{at}. Either the rollout has other weights, or it computes something else.",
        remedy="Try rollout.engine=transformers; raise rollout.max_logprob_difference only if you know why.",
    )
