"""What a transition costs: the paper's formulas (HybridFlow, table 2), and any plan, link by link."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridflow.parallel.boxes import uncovered, volume
from hybridflow.parallel.layout import Box
from hybridflow.resharding.plan import ReshardPlan


@dataclass(frozen=True)
class TransitionCost:
    """Bytes of a device in one transition from training to generation."""

    received: float
    """Communication volume."""

    peak: float
    """The most that weights take."""

    redundant: float
    """Of it, weights held for training that generation does not use in place."""


def deepspeed_chat_cost(weight_bytes: int, *, pipeline: int, tensor: int, data: int) -> TransitionCost:
    """Weights gathered from all devices: volume (t p d - 1) / (t p d) M, peak M, redundancy M / (t p d)."""
    devices = pipeline * tensor * data
    return TransitionCost(weight_bytes * (devices - 1) / devices, weight_bytes, weight_bytes / devices)


def hybridflow_v_cost(weight_bytes: int, *, pipeline: int, tensor: int) -> TransitionCost:
    """Consecutive groups in both stages: volume (t p - 1) / (t p) M, peak M, redundancy M / (t p)."""
    devices = pipeline * tensor
    return TransitionCost(weight_bytes * (devices - 1) / devices, weight_bytes, weight_bytes / devices)


def hybridflow_cost(
    weight_bytes: int, *, pipeline: int, tensor: int, generation_pipeline: int, generation_tensor: int
) -> TransitionCost:
    """Nested groups: volume (t p - t_g p_g) / (t_g p_g t p) M, peak M / (t_g p_g), redundancy 0."""
    trained, generating = pipeline * tensor, generation_pipeline * generation_tensor
    received = weight_bytes * (trained - generating) / (generating * trained)
    return TransitionCost(received, weight_bytes / generating, 0.0)


@dataclass(frozen=True)
class LinkBytes:
    """Where what a rank wants comes from, in bytes."""

    kept: int
    same_node: int
    other_node: int


def link_bytes(plan: ReshardPlan, nodes: Sequence[str]) -> list[LinkBytes]:
    """The bytes of each rank of a plan by link; `nodes` names each rank's machine."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    node = np.array([numbers[name] for name in nodes], dtype=np.int64)
    totals = np.zeros((3, plan.size), dtype=np.int64)
    for route in plan.routes:
        row, source, weights = route.entries()
        destination = route.rows.destinations(row)
        link = np.where(source == destination, 0, np.where(node[source] == node[destination], 1, 2))
        nbytes = route.nbytes[route.rows.regions(row)] * weights
        totals += np.bincount(link * plan.size + destination, nbytes, 3 * plan.size).astype(np.int64).reshape(3, -1)
    return [LinkBytes(*column) for column in totals.T.tolist()]


def plan_cost(plan: ReshardPlan, rank: int) -> TransitionCost:
    """What a plan costs a rank where trained weights lie inside the generation buffers as far as they are wanted.

    The peak is without the buckets of a transfer.
    """
    wanted: dict[str, list[Box]] = defaultdict(list)
    for holding in plan.destinations[rank]:
        wanted[holding.name].append(holding.box)
    redundant = sum(
        volume(box) * held.itemsize for held in plan.sources[rank] for box in uncovered(held.box, wanted[held.name])
    )
    generation = sum(volume(holding.box) * holding.itemsize for holding in plan.destinations[rank])
    return TransitionCost(plan.bytes_received(rank), generation + redundant, redundant)
