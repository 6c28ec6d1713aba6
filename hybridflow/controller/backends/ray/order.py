"""Which device of a pool each rank gets, by the nodes that the devices are on: logic on tables, without a cluster."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridflow.parallel import ParallelMesh


class Slot(NamedTuple):
    """A device of a placement group: the index of its bundle, and the node that the bundle is on."""

    bundle: int
    node: str


def slots_by_rank(nodes: Mapping[int, str], *, devices_per_bundle: int, block: int) -> list[Slot]:
    """The slot of each rank, for bundles whose nodes are given by index.

    Ranks go node by node, nodes with the most devices first, so that rank // devices_per_node is the node. Where a
    node's devices are no multiple of `block`, those left over come last: fewer blocks are then divided between nodes.
    """
    held: dict[str, list[Slot]] = {}
    for bundle in sorted(nodes):
        held.setdefault(nodes[bundle], []).extend([Slot(bundle, nodes[bundle])] * devices_per_bundle)
    by_node = sorted(held.values(), key=lambda slots: -len(slots))
    whole = [slot for slots in by_node for slot in slots[: len(slots) // block * block]]
    return whole + [slot for slots in by_node for slot in slots[len(slots) // block * block :]]


def divided_groups(mesh: ParallelMesh, nodes: Sequence[str], axis: str = "tensor") -> list[list[int]]:
    """The groups of ranks along an axis that span several nodes; `nodes` is that of each rank."""
    return [line for line in mesh.lines((axis,)) if len({nodes[rank] for rank in line}) > 1]
