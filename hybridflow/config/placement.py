"""Which role lives on which devices."""

from dataclasses import dataclass, field
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_1
from hybridflow.config.section import Section


@dataclass
class Pool(Section):
    """A set of devices; roles of one pool share them, pools never overlap."""

    devices: Annotated[int, AT_LEAST_1] = 1
    """Devices in the pool."""


@dataclass
class Placement(Section):
    """Pools and their roles. Without any, one pool holds all devices and all roles."""

    pools: dict[str, Pool] = field(default_factory=dict)
    """Pools by name."""

    roles: dict[str, str] = field(default_factory=dict)
    """The pool of each role; roles not named go to the first pool."""
