"""Which canonical weight a parameter of this engine's chunks holds a piece of, and where."""

import re
from collections.abc import Sequence

from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.megatron import parts_of
from hybridflow.models.names.parts import Part, whole_part
from hybridflow.models.names.rules import Place

_STACKED = re.compile(r"(?P<module>.+)\.(?P<kind>weight|bias)(?:e?s)\.(?P<index>\d+)")


def part_of(parameter_name: str, geometry: ModelGeometry, place: Place, layers: Sequence[int]) -> Part:
    """The one weight in a parameter; the rows of an embedding after the vocabulary's end are in no part.

    Projections that Megatron-Core stacks in one parameter are `StackedLinear`'s `weights.0`, `weights.1` and so on.
    """
    found = _STACKED.fullmatch(parameter_name)
    if found is None:
        (part,) = parts_of(parameter_name, geometry, place, layers)
        return part
    part = parts_of(f"{found['module']}.{found['kind']}", geometry, place, layers)[int(found["index"])]
    return whole_part(part.name, part.layout)
