"""Rules on asynchronous runs: which dataflows can run ahead, and which losses may learn from older samples."""

import logging
from collections.abc import Iterator

from hybridflow.config.algorithm import CorrectionLevel, OldLogprobs
from hybridflow.config.derived import pool_of
from hybridflow.config.loop import BackendKind
from hybridflow.dataflows.interface import is_in_halves, learns_from_samples
from hybridflow.errors import Advice, ConfigError, Problem
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ROLLOUT, is_colocated

logger = logging.getLogger(__name__)

_LEAST_INTERPOLATED = 2
"""Versions that samples must be able to be old for their old log-probabilities to be interpolated."""

_SYNCHRONOUS = "use asynchrony.max_staleness=0"
_UNBOUNDED = ("kl_cov",)
"""Losses that read the old log-probabilities, but limit the ratio of only a few tokens."""


def asynchrony_problems(plan: RunPlan) -> Iterator[Problem]:
    """Asynchronous runs that could not work, or that would learn from older samples as if they were current.

    Logs where nothing overlaps.
    """
    config = plan.config
    staleness = config.asynchrony.max_staleness
    if not staleness:
        return
    key = f"asynchrony.max_staleness={staleness}"
    problems = list(staleness_problems(plan, key))
    yield from problems
    if problems:
        return
    ahead = config.asynchrony.ahead
    if ahead < staleness and not config.asynchrony.partial_rollouts:
        yield Advice(
            f"{key} with asynchrony.ahead={ahead}: no sample is more than {ahead} version{'s' * (ahead > 1)} old,"
            " because only so many batches are generated ahead.",
            remedy=f"Set asynchrony.ahead={staleness} as well, or use asynchrony.max_staleness={ahead}.",
        )
    if plan.backend is BackendKind.local:
        logger.info("%s: with trainer.backend=local, nothing overlaps: only the samples are older", key)
    elif is_colocated(config):
        logger.info(
            "%s: the rollout is in the actor's processes, so generation does not overlap with training;"
            " give it a pool of its own (placement.roles.rollout)", key,
        )  # fmt: skip
    elif not config.asynchrony.partial_rollouts and (waiting := _scorers_between_updates(plan)):
        logger.info(
            "%s: %s shares a pool with a trained role and waits for generation, so generation does not overlap with"
            " training; give it the rollout's pool (placement.roles.%s=%s)",
            key, waiting[0], waiting[0], pool_of(config, ROLLOUT),
        )  # fmt: skip


def staleness_problems(plan: RunPlan, what: str) -> Iterator[ConfigError]:
    """Why a run cannot learn from older samples; `what` is the setting that asks for it."""
    undivided = [*division_problems(plan, what, key="asynchrony.max_staleness")]
    yield from undivided or _loss_problems(plan, what)


def division_problems(plan: RunPlan, what: str, *, key: str) -> Iterator[ConfigError]:
    """Why a step cannot be divided into collecting samples and learning; `what` is the setting that requires it."""
    config, dataflow = plan.config, plan.dataflow
    if not learns_from_samples(dataflow):
        yield ConfigError(
            f"{what}: dataflow={config.dataflow} does not learn from samples of a rollout.",
            remedy=f"Leave {what.partition('=')[0]} out.",
            key=key,
        )
    elif not is_in_halves(dataflow):
        yield ConfigError(
            f"{what}: dataflow={config.dataflow} has its own step, so it is unknown which part of it collects samples.",
            remedy="Divide the step into 'collect(self, prompts)' and 'learn(self, batch)', or leave"
            f" {what.partition('=')[0]} out.",
            key=key,
        )


def interpolation_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """`algorithm.old_logprobs=interpolate` where it changes nothing, or where something else needs the old ones."""
    config, loss = plan.config, plan.functions.policy_loss
    algorithm, asynchrony, key = config.algorithm, config.asynchrony, "algorithm.old_logprobs=interpolate"
    if algorithm.old_logprobs is not OldLogprobs.interpolate or not learns_from_samples(plan.dataflow):
        return
    oldest = asynchrony.max_staleness if asynchrony.partial_rollouts else asynchrony.depth
    if oldest < _LEAST_INTERPOLATED:
        given = f"asynchrony.max_staleness={asynchrony.max_staleness} asynchrony.ahead={asynchrony.ahead}"
        yield ConfigError(
            f"{key} with {given}: samples are at most one version old, for which the interpolation gives the rollout's"
            " log-probabilities.",
            remedy="Use algorithm.old_logprobs=auto, or let samples become two versions old:"
            " asynchrony.max_staleness=2 with asynchrony.ahead=2, or with asynchrony.partial_rollouts=true.",
            key="algorithm.old_logprobs",
            among=["algorithm.old_logprobs", "asynchrony.max_staleness", "asynchrony.ahead"],
        )
    correction = algorithm.correction
    if correction.weights is CorrectionLevel.none:
        yield ConfigError(
            f"{key} without importance weights: the ratio in the loss compares the policy with one between itself and"
            " the rollout's, and nothing corrects for the rest of the difference.",
            remedy="Add the weights of decoupled PPO: algorithm.correction.weights=token.",
            key="algorithm.correction.weights",
            among=["algorithm.old_logprobs", "algorithm.correction.weights"],
        )
    settings = {
        "normalize": correction.normalize,
        "reject": correction.reject is not CorrectionLevel.none,
        "veto": correction.veto is not None,
    }
    for name in (name for name, is_set in settings.items() if is_set):
        yield ConfigError(
            f"{key} with algorithm.correction.{name}, which compares the rollout with the policy before the update: its"
            " log-probabilities are not computed.",
            remedy=f"Leave out algorithm.correction.{name}, or use algorithm.old_logprobs=auto.",
            key=f"algorithm.correction.{name}",
            among=["algorithm.old_logprobs", f"algorithm.correction.{name}"],
        )
    if loss is not None and "old_logprobs" in loss.prepares_from:
        yield ConfigError(
            f"{key} with algorithm.policy_loss={loss.name}, which chooses tokens by their log-probabilities before the"
            " update: they are not computed.",
            remedy="Use algorithm.policy_loss=ppo, or algorithm.old_logprobs=auto.",
            key="algorithm.policy_loss",
            among=["algorithm.old_logprobs", "algorithm.policy_loss"],
        )


def _scorers_between_updates(plan: RunPlan) -> list[str]:
    """The roles that score samples in the pool of a trained role: a pool runs its calls in turn."""
    trained = {role.pool for role in plan.roles if role.is_trained}
    return [role.name for role in plan.roles if role.reward is not None and role.pool in trained]


def _loss_problems(plan: RunPlan, what: str) -> Iterator[ConfigError]:
    """The loss must compare the policy with the one that drew the samples, by a clipped ratio or by weights."""
    algorithm, loss = plan.config.algorithm, plan.functions.policy_loss
    is_weighted = algorithm.correction.weights is not CorrectionLevel.none
    if algorithm.old_logprobs is OldLogprobs.recompute and not is_weighted:
        yield ConfigError(
            f"{what} with algorithm.old_logprobs=recompute: the weights move after samples are drawn, so recomputed"
            " log-probabilities are not those of the policy that drew them, and the ratio would ignore the difference.",
            remedy="Use algorithm.old_logprobs=auto, which takes the rollout's, or add importance weights:"
            " algorithm.correction.weights=token.",
            key="algorithm.old_logprobs",
            among=["asynchrony.max_staleness", "algorithm.old_logprobs"],
        )
    if loss is None or is_weighted:
        return
    if "old_logprobs" not in loss.parameters or loss.name in _UNBOUNDED:
        yield ConfigError(
            f"{what}: algorithm.policy_loss={loss.name} has no trust region, so nothing limits what it learns from"
            " samples of older weights.",
            remedy="Use algorithm.policy_loss=ppo, or correct the loss with importance weights:"
            f" algorithm.correction.weights=token; or {_SYNCHRONOUS}.",
            key="algorithm.policy_loss",
            among=["asynchrony.max_staleness", "algorithm.policy_loss"],
        )
