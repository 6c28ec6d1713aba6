"""Whether a step spends a forward pass on the policy's log-probabilities before its update."""

import logging
from dataclasses import replace

from hybridflow.config.algorithm import KLPlacement, OldLogprobs
from hybridflow.config.derived import optimizer_steps_per_step, training_of
from hybridflow.config.experiment import Experiment
from hybridflow.config.model import Dtype
from hybridflow.dataflows.interface import Dataflow, learns_from_samples
from hybridflow.engines.rollout.traits import ROLLOUT_ENGINES
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.roles import policy_model
from hybridflow.workers.named_functions import estimator, policy_loss

logger = logging.getLogger(__name__)


_SETTING = "algorithm.old_logprobs"


def say_old_logprobs(config: Experiment, dataflow: type[Dataflow]) -> None:
    """Logs what `algorithm.old_logprobs=auto` became."""
    if (became := _became(config, dataflow)) is not None:
        logger.info("%s=auto: %s", _SETTING, became)


def with_old_logprobs_said(composed: Composed, dataflow: type[Dataflow]) -> Composed:
    """The same run; the origin of `algorithm.old_logprobs=auto` also says what it became, for config.yaml."""
    if (became := _became(composed.config, dataflow)) is None:
        return composed
    said = f"{composed.origins[_SETTING]}, became: {became}"
    return replace(composed, origins={**composed.origins, _SETTING: said})


def _became(config: Experiment, dataflow: type[Dataflow]) -> str | None:
    """What `auto` became; None where the user chose or the dataflow does not say."""
    is_chosen = config.algorithm.old_logprobs is not OldLogprobs.auto
    if is_chosen or dataflow.provides is None or not learns_from_samples(dataflow):
        return None
    if wants_old_logprobs(config, dataflow):
        return "a separate forward pass of the actor before the update"
    if config.algorithm.kl.placement is KLPlacement.reward:
        return "no separate forward pass; the KL penalty in the reward uses the rollout's log-probabilities"
    return "no separate forward pass; the update uses the log-probabilities of its own forward pass"


def wants_old_logprobs(config: Experiment, dataflow: type[Dataflow]) -> bool:
    """Whether a step calls `actor.logprobs`, by `algorithm.old_logprobs` and by what reads the answer.

    Without that call the update takes `old_logprobs` from its own forward pass, where the policy is still the old one,
    or from the rollout. Raises `ConfigError` for an estimator or a loss that cannot be called.
    """
    algorithm = config.algorithm
    if not learns_from_samples(dataflow) or algorithm.old_logprobs is OldLogprobs.recompute:
        return True
    read_before = (
        (algorithm.kl.placement is KLPlacement.reward and not kl_reads_rollout(config))
        or algorithm.correction.is_active
        or bool(estimator(algorithm).parameters & {"old_logprobs", "sum_pi_squared"})
    )
    if algorithm.old_logprobs is OldLogprobs.rollout:
        return read_before
    several_steps = optimizer_steps_per_step(config, config.actor) > 1
    return read_before or several_steps or "old_logprobs" in policy_loss(algorithm).prepares_from


def kl_reads_rollout(config: Experiment) -> bool:
    """Whether a KL penalty in the reward may read the rollout's log-probabilities in place of `old_logprobs`.

    The description of `algorithm.old_logprobs` lists when. Device defaults must have been filled in.
    """
    if config.rollout.sampling.is_restricted:
        return False
    assert config.rollout.engine is not None, "device defaults are not filled in"
    rollout, actor = ROLLOUT_ENGINES[config.rollout.engine], TRAINING_ENGINES[training_of(config, "actor").engine]
    same_model = (
        rollout.runs_transformers
        and actor.runs_transformers
        and config.actor.lora.rank == 0
        and policy_model(config).dtype is Dtype.float32
    )
    return same_model or config.algorithm.old_logprobs is OldLogprobs.rollout
