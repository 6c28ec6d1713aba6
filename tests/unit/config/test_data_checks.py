import pytest

from hybridflow.config.data import Data
from hybridflow.config.data_checks import check_data
from hybridflow.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"mixture": [1.0]}, "1 numbers for 2 data.train_files", "one number per file"),
        ({"mixture": [0.7, 0.0]}, "not above 0", "[0.7,0.3]"),
        ({"mixture": [0.7, float("nan")]}, "not above 0", "[0.7,0.3]"),
        ({"curriculum_steps": 5}, "no column says how hard", "data.difficulty_key="),
        ({"curriculum_steps": 5, "difficulty_key": "level", "mixture": [0.5, 0.5]}, "both say", "Leave one out"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, found, remedy):
    with pytest.raises(ConfigError) as caught:
        check_data(Data(train_files=["a.jsonl", "b.jsonl"], **settings))
    assert found in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(
    "settings",
    [{}, {"mixture": [7.0, 3.0]}, {"difficulty_key": "level", "curriculum_steps": 9}, {"max_rows": 1}],
)
def test_settings_that_can_work_are_let_pass(settings):
    check_data(Data(train_files=["a.jsonl", "b.jsonl"], **settings))
