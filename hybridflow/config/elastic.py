"""Settings of runs that continue on other devices when nodes leave or join."""

from dataclasses import dataclass
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_0, AT_LEAST_1
from hybridflow.config.section import Section


@dataclass
class Elastic(Section):
    """Continuing on fewer devices after nodes are lost, and on more after nodes join: from a checkpoint, under a new
    plan, which is made as with `trainer.devices=auto`. Only on a Ray cluster that the run joins."""

    min_devices: Annotated[int | None, AT_LEAST_1] = None
    """Minimum number of devices on which the run continues; with fewer, it waits up to `trainer.start_timeout_seconds`
    for more, and then ends. null: the run never changes its devices."""

    max_devices: Annotated[int | None, AT_LEAST_1] = None
    """Maximum number of devices to which the run grows when nodes join; null: as many as it began with or, with
    `trainer.devices=auto`, all."""

    wait_seconds: Annotated[float, AT_LEAST_0] = 60.0
    """How long lost processes wait for room on other nodes before the run continues on fewer devices."""

    grow_after_seconds: Annotated[float, AT_LEAST_0] = 600.0
    """Minimum time between a plan and the next one with more devices."""
