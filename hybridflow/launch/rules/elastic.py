"""Rules on runs that may continue on other devices."""

from collections.abc import Iterator

from hybridflow.config.checks import elastic_errors
from hybridflow.config.loop import BackendKind
from hybridflow.errors import ConfigError, Problem
from hybridflow.launch.plan.plan import RunPlan

_LEAST = "trainer.elastic.min_devices"


def elastic_problems(plan: RunPlan) -> Iterator[Problem]:
    """A run with `trainer.elastic.min_devices` needs Ray, checkpoints, a variable placement, and consistent bounds."""
    trainer = plan.config.trainer
    least = trainer.elastic.min_devices
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
    yield from elastic_errors(plan.config)
