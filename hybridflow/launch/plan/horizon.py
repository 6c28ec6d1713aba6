"""Over how many steps the learning rate falls: fixed when a run first starts, so that no resume makes the rate jump."""

import logging
from collections.abc import Collection
from dataclasses import replace

from hybridflow.config.derived import optimizer_steps_per_step, run_dir, total_optimizer_steps, training_of
from hybridflow.config.experiment import Experiment
from hybridflow.config.paths import user_path
from hybridflow.config.section import sealed
from hybridflow.config.training import Optimizer, Schedule, Training
from hybridflow.elastic.checkpoint import CheckpointStore, saved_config
from hybridflow.engines.training.optimizer import learning_rate
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import Composed

logger = logging.getLogger(__name__)

ORIGIN = "trainer.total_steps"
_SECTIONS = ("actor", "critic")


def with_schedule_steps(composed: Composed) -> Composed:
    """The same run with `optimizer.schedule_steps` filled in: as in the checkpoint it resumes, else its total steps."""
    config, saved = composed.config, _saved(composed.config)
    changed: dict[str, Training] = {}
    origins = dict(composed.origins)
    for name in _SECTIONS:
        training: Training = vars(config)[name]
        if training.optimizer.schedule_steps is None:
            kept = saved.get(f"{name}.optimizer.schedule_steps")
            steps = kept if isinstance(kept, int) else config.trainer.total_steps
            changed[name] = replace(training, optimizer=replace(training.optimizer, schedule_steps=steps))
            origins[f"{name}.optimizer.schedule_steps"] = ORIGIN
    return replace(composed, config=sealed(replace(config, **changed)), origins=origins)


def check_horizon(config: Experiment, trained: Collection[str]) -> None:
    """Raises `ConfigError` that names every role whose schedule ends before the run; logs the last rate of others.

    `trained` are the names of the roles that learn; all but critics learn as the section `actor` says.
    """
    learns = {"critic" if name.endswith("critic") else "actor" for name in trained}
    total, found, remedies = config.trainer.total_steps, [], []
    for name in [section for section in _SECTIONS if section in learns]:
        training = training_of(config, name)
        optimizer, key = training.optimizer, f"{name}.optimizer.schedule_steps"
        horizon = optimizer.schedule_steps or total
        if optimizer.schedule is Schedule.constant or horizon == total:
            continue
        if horizon < total:
            other = replace(optimizer, schedule_steps=total)
            found.append(
                f"trainer.total_steps={total} goes beyond {key}={horizon}: with {name}.optimizer.schedule="
                f"{optimizer.schedule.name} the learning rate is 0 from step {horizon + 1} on."
            )
            remedies.append(
                f"Set {key}={total}: the rate is then {_rate(config, training, other, horizon):.3g} at step"
                f" {horizon + 1} and falls to 0 after step {total}. Or set {name}.optimizer.schedule=constant:"
                f" {optimizer.learning_rate:.3g} throughout."
            )
            continue
        logger.info(
            "%s=%d: the learning rate of the last step, %d, is %.3g; with %s=%d it would fall to 0 after that",
            key, horizon, total, _rate(config, training, optimizer, total - 1), key, total,
        )  # fmt: skip
    if found:
        raise ConfigError(" ".join(found), remedy=" ".join(remedies))


def _saved(config: Experiment) -> dict[str, object]:
    """The settings of the run that is resumed; nothing where it starts over."""
    if config.trainer.resume == "never":
        return {}
    if config.trainer.resume == "auto":
        return next(filter(None, map(saved_config, reversed(CheckpointStore(run_dir(config)).paths()))), {})
    return saved_config(user_path(config.trainer.resume, key="trainer.resume"))


def _rate(config: Experiment, training: Training, optimizer: Optimizer, step: int) -> float:
    """The learning rate of the first optimizer step after `step` training steps."""
    training = replace(training, optimizer=optimizer)
    return learning_rate(
        step * optimizer_steps_per_step(config, training),
        optimizer=optimizer,
        total_steps=total_optimizer_steps(config, training),
    )
