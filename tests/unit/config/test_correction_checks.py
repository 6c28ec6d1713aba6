"""Rules of algorithm.correction: what breaks one is named, with what to do."""

import pytest

from hybridflow.config.algorithm import Correction, CorrectionLevel, OldLogprobs
from hybridflow.config.correction_checks import check_correction
from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError

TOKEN = CorrectionLevel.token


def checked(**settings: object) -> None:
    config = Experiment()
    config.algorithm.correction = Correction(**settings)
    check_correction(config)


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
def test_the_rollouts_log_probabilities_and_weights_would_count_the_ratio_twice(level):
    config = Experiment()
    config.algorithm.old_logprobs, config.algorithm.correction = OldLogprobs.rollout, Correction(weights=level)
    with pytest.raises(ConfigError, match="old_logprobs=rollout with .*count it twice") as caught:
        check_correction(config)
    assert "algorithm.correction.weights=none" in caught.value.remedy
    assert "cispo" in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "needs_both"),
    [
        ({}, False),
        ({"weights": TOKEN, "lower": 0.5, "normalize": True}, True),
        ({"reject": CorrectionLevel.geometric, "reject_upper": 1.001}, True),
        ({"veto": 1e-4}, True),
    ],
    ids=str,
)
def test_what_is_right_passes_and_is_known_to_be_active(settings, needs_both):
    checked(**settings)
    assert Correction(**settings).is_active is needs_both
