"""Rules on runs that may continue on other devices."""

from collections.abc import Iterator

from hybridflow.config.derived import num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.errors import ConfigError, Problem
from hybridflow.launch.plan.plan import RunPlan

_LEAST = "trainer.elastic.min_devices"


def elastic_problems(plan: RunPlan) -> Iterator[Problem]:
    """A run with `trainer.elastic.min_devices` needs Ray, checkpoints, a variable placement, and consistent bounds."""
    trainer, bounds = plan.config.trainer, plan.config.trainer.elastic
    least = bounds.min_devices
    if least is None:
        return
    own = sorted(key for key in plan.asked.user_keys if key.startswith(("placement.pools", "placement.roles")))
    if own:
        yield ConfigError(
            f"{_LEAST}={least}: the run may continue on other devices, but {', '.join(own)} fixes its pools.",
            remedy="Leave the placement to hybridflow (placement=auto, split, standalone or colocated), or leave out"
            f" {_LEAST}.",
            key=_LEAST,
        )
    if plan.backend is not BackendKind.ray:
        yield ConfigError(
            f"{_LEAST}={least} has no effect with trainer.backend=local: only Ray's nodes leave and join.",
            remedy=f"Use trainer.backend=ray, or leave out {_LEAST}.",
            key=_LEAST,
        )
    if not trainer.save_every and trainer.total_steps:
        yield ConfigError(
            f"{_LEAST}={least}: a run continues on other devices from a checkpoint, but trainer.save_every=0.",
            remedy=f"Set trainer.save_every, or leave out {_LEAST}.",
            among=[_LEAST, "trainer.save_every"],
        )
    yield from bound_problems(plan.config)


def bound_problems(config: Experiment) -> Iterator[Problem]:
    """`trainer.elastic.min_devices` and `max_devices` must include the number of devices with which the run begins."""
    bounds, devices = config.trainer.elastic, config.trainer.devices
    least, most = bounds.min_devices, bounds.max_devices
    if least is None or not devices:
        return
    used = num_devices(config)
    if most is not None and most < least:
        yield ConfigError(
            f"trainer.elastic.max_devices={most} is below {_LEAST}={least}.",
            remedy=f"Raise trainer.elastic.max_devices to at least {least}.",
            among=[_LEAST, "trainer.elastic.max_devices"],
        )
    elif most is not None and used > most:
        yield ConfigError(
            f"The run begins on {used} devices, more than trainer.elastic.max_devices={most}.",
            remedy=f"Set trainer.elastic.max_devices to at least {used}, or use fewer devices.",
            among=[_LEAST, "trainer.elastic.max_devices"],
        )
    elif used < least:
        yield ConfigError(
            f"The run begins on {used} devices, fewer than {_LEAST}={least}.",
            remedy=f"Set {_LEAST} to at most {used}, or use more devices.",
            key=_LEAST,
        )
