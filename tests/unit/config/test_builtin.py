import pytest

from hybridflow.config.builtin import builtin_path
from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError


def test_builtin_names_lie_in_the_package():
    assert builtin_path("builtin:calculator").parts[-3:] == ("assets", "calculator", "model")
    assert builtin_path("builtin:calculator/train").parts[-2:] == ("calculator", "train.jsonl")
    assert builtin_path("builtin:calculator/eval").parts[-4:-2] == ("hybridflow", "assets")


def test_an_unknown_builtin_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="builtin:calculater/train") as caught:
        builtin_path("builtin:calculater/train")
    assert "Did you mean 'builtin:calculator/train'?" in caught.value.remedy


def test_nothing_near_means_no_suggestion():
    assert did_you_mean("zzz", ["exact_match", "gsm8k"]) == ""
