"""Rules of algorithm.correction: what breaks one is named, with what to do."""

import math

import pytest

from hybridflow.config.algorithm import Correction, CorrectionLevel, KLPlacement
from hybridflow.config.correction_checks import check_correction, check_old_logprobs, compares, is_corrected
from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError

TOKEN = CorrectionLevel.token


def checked(**settings: object) -> None:
    config = Experiment()
    config.algorithm.correction = Correction(**settings)
    check_correction(config)


@pytest.mark.parametrize("name", ["upper", "lower", "reject_upper", "reject_lower", "veto"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_bounds_are_above_zero(name, value):
    with pytest.raises(ConfigError, match=rf"correction\.{name}=.*out of range") as caught:
        checked(**{"weights": TOKEN, "reject": TOKEN, name: value})
    assert "above 0" in caught.value.remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": TOKEN, "upper": 2.0, "lower": 2.5},
        {"reject": TOKEN, "reject_upper": 2.0, "reject_lower": 2.0},
        {"reject": TOKEN, "reject_upper": 0.5},
    ],
    ids=str,
)
def test_something_lies_between_the_bounds(settings):
    with pytest.raises(ConfigError, match="nothing lies between") as caught:
        checked(**settings)
    assert "above 1" in caught.value.remedy


@pytest.mark.parametrize("settings", [{"lower": 0.5}, {"normalize": True}], ids=str)
def test_what_concerns_weights_needs_weights(settings):
    with pytest.raises(ConfigError, match="there are no weights") as caught:
        checked(**settings)
    assert "algorithm.correction.weights=token" in caught.value.remedy


@pytest.mark.parametrize("level", [TOKEN, CorrectionLevel.sequence, CorrectionLevel.geometric])
def test_bypass_and_weights_would_count_the_ratio_twice(level):
    with pytest.raises(ConfigError, match="count it twice") as caught:
        checked(bypass=True, weights=level)
    assert "algorithm.correction.weights=none" in caught.value.remedy
    assert "cispo" in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "is_on", "needs_both"),
    [
        ({}, False, False),
        ({"bypass": True}, True, False),
        ({"weights": TOKEN, "lower": 0.5, "normalize": True}, True, True),
        ({"bypass": True, "reject": CorrectionLevel.geometric, "reject_upper": 1.001}, True, True),
        ({"veto": 1e-4}, True, True),
    ],
    ids=str,
)
def test_what_is_right_passes_and_is_known_to_compare(settings, is_on, needs_both):
    checked(**settings)
    assert is_corrected(Correction(**settings)) is is_on
    assert compares(Correction(**settings)) is needs_both


def without_old_logprobs() -> Experiment:
    config = Experiment(dataflow="grpo", dataflow_settings={"recompute_logprobs": False})
    config.algorithm.advantage = "grpo"
    config.actor.epochs, config.actor.minibatch_size = 1, None
    return config


def test_one_optimizer_step_a_batch_needs_no_old_log_probabilities():
    check_old_logprobs(without_old_logprobs())


def test_several_do_unless_the_rollouts_serve():
    config = without_old_logprobs()
    config.data.batch_size, config.actor.minibatch_size = 32, 8
    with pytest.raises(ConfigError, match="recompute_logprobs=false.*4 optimizer steps") as caught:
        check_old_logprobs(config)
    assert "bypass=true" in caught.value.remedy
    config.algorithm.correction.bypass = True
    check_old_logprobs(config)


@pytest.mark.parametrize("advantage", ["optimal_token_baseline", "grpo"])
def test_what_reads_old_log_probabilities_asks_for_them(advantage):
    config = without_old_logprobs()
    config.algorithm.advantage = advantage
    if advantage == "grpo":
        config.algorithm.kl.placement = KLPlacement.reward
    with pytest.raises(ConfigError, match="optimal_token_baseline|kl.placement=reward") as caught:
        check_old_logprobs(config)
    assert "recompute_logprobs=true" in caught.value.remedy
