from dataclasses import replace

import pytest

from hybridflow.algorithms.kl_controller import KLController

ADAPTIVE = KLController(0.2, target=6.0, horizon=1000)


@pytest.mark.parametrize(
    ("kl", "target", "expected"),
    [
        (6.6, 6.0, 0.2 * (1 + 0.1 * 0.5)),
        (60.0, 6.0, 0.2 * (1 + 0.2 * 0.5)),
        (6.0, 6.0, 0.2),
        (0.0, 6.0, 0.2 * (1 - 0.2 * 0.5)),
        (60.0, None, 0.2),
    ],
)
def test_the_coefficient_by_hand(kl, target, expected):
    controller = replace(ADAPTIVE, target=target)
    controller.update(kl, num_sequences=500)
    assert controller.coefficient == pytest.approx(expected)


@pytest.mark.parametrize("target", [6.0, None])
def test_a_restored_controller_continues_where_the_first_stopped(target):
    first, second = (replace(ADAPTIVE, target=target) for _ in range(2))
    first.update(9.0, num_sequences=64)
    second.restore(first.state())
    for controller in (first, second):
        controller.update(1.0, num_sequences=64)
    assert first == second


def test_a_target_set_in_a_resumed_run_starts_from_the_coefficient_of_the_settings():
    controller = replace(ADAPTIVE)
    controller.restore(replace(ADAPTIVE, target=None).state())
    assert controller == ADAPTIVE
