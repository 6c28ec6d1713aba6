"""What a followed step shows to be wrong with a dataflow, before a run pays for its first step."""

import logging
from collections.abc import Sequence

from hybridflow.config.choices import is_own
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import ConfigError
from hybridflow.launch.roles import ACTOR
from hybridflow.launch.tracing.backend import Noted
from hybridflow.workers.methods import ESTIMATOR_COLUMNS, estimator

logger = logging.getLogger(__name__)

_LEARNS = ("update", "imitate", "prefer")


def check_followed(config: Experiment, program: Dataflow, calls: Sequence[Noted]) -> None:
    """Raises `ConfigError` for a step that cannot work, and warns of a step that reports nothing.

    `program` has run one step, which made `calls`.
    """
    name = f"dataflow={config.dataflow}"
    _check_published(name, calls)
    if is_own(config.dataflow):
        _check_estimator(config, name, calls)
    if program.data == "prompts" and program.last_batch is None:
        logger.warning(
            "%s: the step never calls self.observe(prompts, batch), so neither scores nor lengths are reported", name
        )


def _check_published(name: str, calls: Sequence[Noted]) -> None:
    """A policy that generates publishes its weights after it has learned."""
    methods = [call.method for call in calls if call.role == ACTOR]
    learned = [index for index, method in enumerate(methods) if method in _LEARNS]
    generates = any(call.method == "generate" for call in calls)
    if generates and learned and "publish_weights" not in methods[learned[-1] :]:
        raise ConfigError(
            f"{name}: the step calls actor.{methods[learned[-1]]} and does not publish the new weights, so the next"
            " step would sample from the old ones.",
            remedy="End the step with self.actor.publish_weights(version=self.iteration + 1).",
        )


def _check_estimator(config: Experiment, name: str, calls: Sequence[Noted]) -> None:
    """The batch has the columns that the advantage estimator needs."""
    bound = estimator(config.algorithm)
    needed = [column for column in ESTIMATOR_COLUMNS if column in bound.needs]
    for call in calls:
        taken = {column for columns in call.takes.values() for column in columns}
        missing = [column for column in needed if column not in taken]
        if call.method == "advantages" and missing:
            raise ConfigError(
                f"{name}: algorithm.advantage={bound.name} needs the column '{missing[0]}', and no call before"
                f" {call.role}.advantages adds it.",
                remedy="Choose an estimator without a critic, such as algorithm.advantage=rloo, or join the call that"
                f" adds '{missing[0]}'.",
            )
