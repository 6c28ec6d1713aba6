"""What a search is asked, and how it answers: restrictions, ties, plans that do not fit, contradictions."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridflow.config.placement import PlacementKind
from hybridflow.errors import HybridflowError
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.operations import Operation, OperationKind, Option
from hybridflow.mapping.partitions import Restrictions, partition_name, partitions
from hybridflow.mapping.planner import pool_sizes
from hybridflow.mapping.search import Problem, search
from hybridflow.mapping.tables import MemoryLimit

MODELS = ("actor", "critic", "reference", "reward")
NO_RESTRICTIONS = Restrictions()


class Perfect:
    """Twice the devices, half the seconds and half the memory."""

    def __init__(self, seconds: float = 64.0, bytes_in_all: float = 64.0) -> None:
        self.seconds = seconds
        self.bytes_in_all = bytes_in_all

    def options(self, unit: tuple[str, ...], sizes: Sequence[int]) -> Sequence[Sequence[Option]]:
        return [self.on(unit, size) for size in sizes]

    def on(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
        share = len(unit) / num_devices
        return [Option("only", (self.seconds / num_devices,) * len(unit), self.bytes_in_all * share, 0.0)]


class UpTo(Perfect):
    """No faster on more than some devices."""

    def __init__(self, most_devices: int) -> None:
        super().__init__()
        self.most_devices = most_devices

    def on(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
        return super().on(unit, min(num_devices, self.most_devices))


PARALLEL = Problem(
    operations=[Operation(f"{role}.update", role, OperationKind.update, ()) for role in ("actor", "critic")],
    costs=Perfect(),
    num_devices=8,
    memory=MemoryLimit(100.0),
)
"""Two roles that do not wait for each other."""


def test_four_models_have_15_placements_and_five_have_52():
    assert len(set(partitions(MODELS, (), NO_RESTRICTIONS))) == 15
    assert len(set(partitions((*MODELS, "cost"), (), NO_RESTRICTIONS))) == 52


def test_standalone_places_the_rollout_with_the_actor_or_apart():
    rules = Restrictions(kind=PlacementKind.standalone)
    found = {partition_name(each) for each in partitions(("rollout", "actor", "critic"), [("rollout", "actor")], rules)}
    assert found == {"rollout+actor | critic", "rollout | actor | critic"}


def test_roles_of_named_pools_stay_together_and_apart():
    rules = Restrictions(pool_of={"actor": "main", "reference": "main", "critic": "other"})
    found = {partition_name(each) for each in partitions(MODELS, (), rules)}
    assert found == {
        "actor+reference | critic | reward",
        "actor+reference+reward | critic",
        "actor+reference | critic+reward",
    }


def test_a_named_pool_has_the_devices_given_for_it():
    rules = Restrictions(pool_of={"actor": "main", "critic": "other"}, pool_devices={"main": 3})
    (plan,) = search(replace(PARALLEL, restrictions=rules)).plans
    assert [(pool.roles, pool.num_devices) for pool in plan.pools] == [(("actor",), 3), (("critic",), 5)]
    assert plan.schedule.seconds == 64 / 3


def test_nodes_are_not_divided():
    plans = search(replace(PARALLEL, num_devices=15, restrictions=Restrictions(granularity=4))).plans
    assert {tuple(pool.num_devices for pool in plan.pools) for plan in plans} == {(12,), (4, 8)}
    assert {plan.idle_devices for plan in plans} == {3}


def test_of_equally_long_steps_the_one_with_fewer_idle_devices_is_best():
    (plan,) = search(replace(PARALLEL, costs=UpTo(2), restrictions=Restrictions(kind=PlacementKind.split))).plans
    assert plan.schedule.seconds == 32
    assert sum(pool.num_devices for pool in plan.pools) == 8


def test_devices_are_left_idle_where_they_would_slow_the_step_down():
    class SlowerThanTwo(Perfect):
        def on(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
            return super().on(unit, num_devices if num_devices < 3 else 1)

    plan = search(replace(PARALLEL, costs=SlowerThanTwo())).plans[0]
    assert (plan.name, plan.schedule.seconds, plan.idle_devices) == ("actor | critic", 32, 4)


def test_the_same_problem_has_the_same_plan():
    assert search(replace(PARALLEL, costs=UpTo(2))) == search(replace(PARALLEL, costs=UpTo(2)))


def test_a_search_finds_nothing_if_one_role_does_not_fit():
    class OneFits(Perfect):
        def on(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
            return super().on(unit, num_devices) if unit == ("actor",) else ()

    found = search(replace(PARALLEL, costs=OneFits(), memory=MemoryLimit(20.0)))
    assert (found.plans, found.best_of_kind) == ((), {})


def test_options_that_fit_one_by_one_but_not_together_are_no_plan():
    class EitherLarge(Perfect):
        """Each role takes 60 bytes for the whole step, or 60 while it computes."""

        def on(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
            return [Option("resident", (1.0,), 60.0, 0.0), Option("extra", (2.0,), 10.0, 60.0)]

    rules = Restrictions(kind=PlacementKind.colocated)
    assert search(replace(PARALLEL, costs=EitherLarge(), memory=MemoryLimit(70.0), restrictions=rules)).plans == ()
    (plan,) = search(replace(PARALLEL, costs=EitherLarge(), memory=MemoryLimit(80.0), restrictions=rules)).plans
    assert plan.schedule.seconds == 4


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"joint": [("actor", "rolout")]}, "name actor, rolout", "Name only roles with operations"),
        ({"joint": [("actor", "critic"), ("critic",)]}, "two joint groups", "Name each role once"),
        ({"fixed_seconds": {"critic": ()}}, "critic has 1 operations in a step, but 0", "each of its operations"),
        ({"fixed_seconds": {"actor": (1.0,), "critic": (1.0,)}}, "placed roles are none", "at least one"),
        ({"restrictions": Restrictions(pool_devices={"main": 3})}, "No role is in the pools main", "Name the roles"),
        ({"lag": -1}, "a lag of -1", "a lag of at least 0"),
        ({"operations": [Operation("a.b", "a", OperationKind.update, (0,))]}, r"needs \(0,\)", "in the order"),
        (
            {"costs": Perfect(float("nan"))},
            "An option of actor on 1 devices is not 1 seconds",
            "Correct the cost table",
        ),
    ],
)
def test_contradictions_are_errors(changes, message, remedy):
    with pytest.raises(HybridflowError, match=message) as caught:
        search(replace(PARALLEL, **changes))
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        ("128xH100", 1),
        ("2x72xGB200", 1),
        ("26x5xH100", 1),
        ("32x8xH100", 2),
        ("128x8xH100", 8),
        ("145x8xH100", 16),
        ("16384x8xH100", 1024),
    ],
)
def test_pools_of_many_devices_have_multiples_of_a_number_of_devices(devices, size):
    cluster = cluster_of(devices)
    multiple, also = pool_sizes(cluster)
    assert multiple == size
    assert cluster.num_devices / size <= 144
    assert cluster.num_devices in also
    assert set(also) >= {8, 16, 512} or size <= 16
