"""Rules on asynchronous runs: which dataflows can run ahead, and which losses may learn from older samples."""

import logging
from collections.abc import Iterator
from pathlib import Path

from hybridflow.config.algorithm import CorrectionLevel, OldLogprobs
from hybridflow.config.choices import is_own
from hybridflow.config.loop import BackendKind
from hybridflow.dataflows.interface import is_in_halves, learns_from_samples
from hybridflow.dataflows.schedule import recorded_steps
from hybridflow.engines.rollout.custom import custom_engine
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import is_colocated

logger = logging.getLogger(__name__)

_PARTIAL = "asynchrony.partial_rollouts=true"
_SYNCHRONOUS = "use asynchrony.max_staleness=0"
_UNBOUNDED = ("kl_cov",)
"""Losses that read the old log-probabilities, but limit the ratio of only a few tokens."""


def asynchrony_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """Asynchronous runs that could not work, or that would learn from older samples as if they were current.

    Logs where nothing overlaps.
    """
    config, dataflow = plan.config, plan.dataflow
    staleness = config.asynchrony.max_staleness
    if not staleness:
        if config.asynchrony.partial_rollouts:
            yield ConfigError(
                f"{_PARTIAL} with asynchrony.max_staleness=0: a response that continues with new weights has older"
                " tokens.",
                remedy="Set asynchrony.max_staleness to 1 or more, or leave asynchrony.partial_rollouts out.",
                key="asynchrony.partial_rollouts",
                among=["asynchrony.max_staleness", "asynchrony.partial_rollouts"],
            )
        return
    key = f"asynchrony.max_staleness={staleness}"
    if not learns_from_samples(dataflow):
        yield ConfigError(
            f"{key}: dataflow={config.dataflow} does not learn from samples of a rollout, so nothing can be generated"
            " ahead.",
            remedy="Leave asynchrony out.",
            key="asynchrony.max_staleness",
        )
        return
    if not is_in_halves(dataflow):
        yield ConfigError(
            f"{key}: dataflow={config.dataflow} has its own step, so it is unknown which part of it may be called"
            " ahead.",
            remedy=f"Divide the step into 'collect(self, prompts)' and 'learn(self, batch)', or {_SYNCHRONOUS}.",
            key="asynchrony.max_staleness",
        )
        return
    yield from _loss_problems(plan, key)
    if config.asynchrony.partial_rollouts:
        yield from _partial_rollout_problems(plan)
    if plan.backend is BackendKind.local:
        logger.info("%s: with trainer.backend=local, nothing overlaps: only the samples are older", key)
    elif is_colocated(config):
        logger.info(
            "%s: the rollout is in the actor's processes, so generation does not overlap with training;"
            " give it a pool of its own (placement.roles.rollout)", key,
        )  # fmt: skip


def _partial_rollout_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """Rows that cannot continue from call to call, and a schedule that cannot be repeated."""
    config = plan.config
    if config.environment.name is not None:
        yield ConfigError(
            f"{_PARTIAL} with environment={config.environment.name}: episodes do not continue after an update.",
            remedy="Use asynchrony.partial_rollouts=false: batches of episodes are then generated ahead.",
            key="asynchrony.partial_rollouts",
            among=["environment.name", "asynchrony.partial_rollouts"],
        )
    engine = config.rollout.engine
    if engine is not None and is_own(engine) and "submit" not in dir(custom_engine(engine)):
        yield ConfigError(
            f"{_PARTIAL}: rollout.engine={engine} has no method submit, so its rows cannot continue after an update.",
            remedy="Derive it from hybridflow.engines.rollout.custom.CustomEngine, or use"
            " asynchrony.partial_rollouts=false.",
            key="rollout.engine",
        )
    if config.asynchrony.replay is not None:
        recorded = len(recorded_steps(Path(config.asynchrony.replay)))
        if recorded < config.trainer.total_steps:
            yield ConfigError(
                f"asynchrony.replay={config.asynchrony.replay} has {recorded} steps, and this run"
                f" trainer.total_steps={config.trainer.total_steps}.",
                remedy=f"Set trainer.total_steps={recorded}, the number of steps to repeat.",
                key="asynchrony.replay",
                among=["asynchrony.replay", "trainer.total_steps"],
            )


def _loss_problems(plan: RunPlan, key: str) -> Iterator[ConfigError]:
    """The loss must compare the policy with the one that drew the samples, by a clipped ratio or by weights."""
    algorithm, loss = plan.config.algorithm, plan.functions.policy_loss
    is_weighted = algorithm.correction.weights is not CorrectionLevel.none
    if algorithm.old_logprobs is OldLogprobs.recompute and not is_weighted:
        yield ConfigError(
            f"{key} with algorithm.old_logprobs=recompute: the weights move after samples are drawn, so recomputed"
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
            f"{key}: algorithm.policy_loss={loss.name} has no trust region, so nothing limits what it learns from"
            " samples of older weights.",
            remedy="Use algorithm.policy_loss=ppo, or correct the loss with importance weights:"
            f" algorithm.correction.weights=token; or {_SYNCHRONOUS}.",
            key="algorithm.policy_loss",
            among=["asynchrony.max_staleness", "algorithm.policy_loss"],
        )
