"""All checks of this machine, in the order in which they run: an earlier problem may be the cause of later ones."""

from hybridflow.doctor.check import Check
from hybridflow.doctor.checks import (
    collectives,
    devices,
    disk,
    machine,
    micro_runs,
    network,
    packages,
    ray,
    weights,
)

CHECKS: tuple[Check, ...] = (
    *packages.CHECKS,
    *devices.CHECKS,
    *machine.CHECKS,
    *network.CHECKS,
    *disk.CHECKS,
    *ray.CHECKS,
    *collectives.CHECKS,
    *weights.CHECKS,
    *micro_runs.CHECKS,
)
