"""What faults cost, against a run that is played on a clock."""

import random

import pytest

from hybridflow.elastic.fault_costs import FaultCost, FaultCosts


def test_a_fault_costs_its_recovery_and_the_steps_that_are_repeated():
    costs = FaultCosts()
    costs.reached(3, at=10.0)
    costs.reached(4, at=15.0)
    costs.occurred(at=17.0)
    assert costs.continued(3, at=20.0) == [FaultCost(seconds=3.0, cost_seconds=10.0)]


def test_a_fault_during_a_recovery_begins_where_the_cost_of_the_first_ends():
    costs = FaultCosts()
    costs.reached(3, at=10.0)
    costs.occurred(at=12.0)
    costs.reached(3, at=14.0)  # within the recovery
    costs.occurred(at=15.0)
    assert costs.continued(3, at=21.0) == [FaultCost(9.0, 5.0), FaultCost(6.0, 6.0)]


def test_without_the_time_of_a_step_a_fault_costs_its_recovery():
    costs = FaultCosts()
    costs.occurred(at=12.0)
    assert costs.continued(3, at=13.0) == [FaultCost(1.0, 1.0)]


@pytest.mark.parametrize("seed", range(5))
def test_costs_and_the_steps_that_count_add_up_to_the_time_of_the_run(seed):
    draw, costs, kept = random.Random(seed), FaultCosts(), list[float]()
    clock = lost = 0.0
    costs.reached(0, at=clock)
    for _ in range(60):
        clock += (worked := draw.random())
        if draw.random() < 0.6:
            kept.append(worked)
        else:
            for _ in range(draw.randint(1, 3)):
                costs.occurred(at=clock)
                clock += draw.random()
            del kept[draw.randint(0, len(kept)) :]
            lost += sum(cost.cost_seconds for cost in costs.continued(len(kept), at=clock))
        costs.reached(len(kept), at=clock)
    assert lost > 0 and sum(kept) + lost == pytest.approx(clock)
