"""Placements: which roles share a pool of devices (HybridFlow, sec. 6: the set partitions of the models)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybridflow.config.placement import PlacementKind

Partition = tuple[tuple[str, ...], ...]
"""The roles of each pool. Roles and pools are in the order of the step."""

Unit = tuple[str, ...]
"""Roles of one pool that are laid out together."""


@dataclass(frozen=True, kw_only=True)
class Restrictions:
    """The placements and allocations among which a search chooses."""

    kind: PlacementKind | None = None
    """One of those in `kinds_of`."""

    pool_of: Mapping[str, str] = field(default_factory=dict)
    """Pool names of roles: roles with the same name share a pool, roles with different names do not."""

    pool_devices: Mapping[str, int] = field(default_factory=dict)
    """The number of devices of named pools."""

    granularity: int = 1
    """The devices of other pools are a multiple of this: the size of a node, for whole nodes."""

    also: Sequence[int] = ()
    """Numbers of devices that other pools can have in addition to these multiples."""

    def pool_name(self, pool: Sequence[str]) -> str | None:
        """The name of a pool of an allowed partition."""
        return next((self.pool_of[role] for role in pool if role in self.pool_of), None)

    def sizes(self, pool: Sequence[str], num_devices: int) -> Sequence[int]:
        """The numbers of devices that the pool can have."""
        name = self.pool_name(pool)
        if name is not None and name in self.pool_devices:
            fixed = self.pool_devices[name]
            return range(fixed, fixed + 1) if 1 <= fixed <= num_devices else range(0)
        multiples = range(self.granularity, num_devices + 1, self.granularity)
        return sorted({*multiples, *self.also})


def partitions(roles: Sequence[str], joint: Sequence[Sequence[str]], restrictions: Restrictions) -> Iterator[Partition]:
    """The allowed set partitions of the roles."""
    for partition in _set_partitions(tuple(roles)):
        names = [{restrictions.pool_of[role] for role in pool if role in restrictions.pool_of} for pool in partition]
        named = [name for each in names for name in each]
        is_as_named = all(len(each) <= 1 for each in names) and len(named) == len(set(named))
        if is_as_named and (restrictions.kind is None or restrictions.kind in kinds_of(partition, joint)):
            yield partition


def kinds_of(partition: Partition, joint: Sequence[Sequence[str]]) -> tuple[PlacementKind, ...]:
    """The kinds of a partition, of one pool, of two, or of one for each role or roles that are laid out together."""
    is_of_kind = {
        PlacementKind.colocated: len(partition) == 1,
        PlacementKind.split: len(partition) == 2,
        PlacementKind.standalone: all(len(units_of(pool, joint)) == 1 for pool in partition),
    }
    return tuple(kind for kind, holds in is_of_kind.items() if holds)


def units_of(pool: Sequence[str], joint: Sequence[Sequence[str]]) -> tuple[Unit, ...]:
    """The units of a pool: its roles of each joint group, and each other role by itself."""
    group_of = {role: number for number, group in enumerate(joint) for role in group}
    units: dict[int | str, Unit] = {}
    for role in pool:
        key = group_of.get(role, role)
        units[key] = (*units.get(key, ()), role)
    return tuple(units.values())


def pool_numbers(partition: Partition) -> dict[str, int]:
    """The number of each role's pool."""
    return {role: number for number, pool in enumerate(partition) for role in pool}


def partition_name(partition: Partition) -> str:
    """`actor+rollout | critic`."""
    return " | ".join("+".join(pool) for pool in partition)


def _set_partitions(roles: tuple[str, ...]) -> Iterator[Partition]:
    """All set partitions: the last role joins each pool of the others, or has its own."""
    if not roles:
        yield ()
        return
    *others, last = roles
    for partition in _set_partitions(tuple(others)):
        for number, pool in enumerate(partition):
            yield (*partition[:number], (*pool, last), *partition[number + 1 :])
        yield (*partition, (last,))
