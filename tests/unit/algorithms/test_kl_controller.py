import pytest

from hybridflow.algorithms.kl_controller import AdaptiveKL, FixedKL, KLController


def test_the_fixed_coefficient_stays():
    controller: KLController = FixedKL(0.1)
    controller.update(5.0, num_sequences=100)
    controller.restore(controller.state())
    assert controller.coefficient == 0.1


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.6, 0.2 * (1 + 0.1 * 0.5)), (60.0, 0.2 * (1 + 0.2 * 0.5)), (6.0, 0.2), (0.0, 0.2 * (1 - 0.2 * 0.5))],
)
def test_the_adaptive_coefficient_by_hand(kl, expected):
    controller = AdaptiveKL(0.2, target=6.0, horizon=1000)
    controller.update(kl, num_sequences=500)
    assert controller.coefficient == pytest.approx(expected)


def test_a_restored_controller_continues_where_the_first_stopped():
    first, second = (AdaptiveKL(0.2, target=6.0, horizon=1000) for _ in range(2))
    first.update(9.0, num_sequences=64)
    second.restore(first.state())
    for controller in (first, second):
        controller.update(1.0, num_sequences=64)
    assert first == second


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 100), (1.0, 0)])
def test_a_target_or_horizon_of_zero_is_refused(target, horizon):
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKL(0.1, target=target, horizon=horizon)
