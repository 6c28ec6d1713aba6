import pytest

from hybridflow.config.data import Data
from hybridflow.data import load_prompts
from hybridflow.data.reasoning_gym import parsed
from hybridflow.data.sources import read_table
from hybridflow.errors import DataError


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reasoning_gym:leg_counting", {}),
        ("reasoning_gym:leg_counting?size=500&seed=1", {"size": 500, "seed": 1}),
        ("reasoning_gym:leg_counting?p=0.5&names=[1,2]&kind=long", {"p": 0.5, "names": [1, 2], "kind": "long"}),
    ],
)
def test_settings_follow_the_task(name, settings):
    assert parsed(name) == ("leg_counting", settings)


def test_settings_that_cannot_be_read_are_an_error():
    with pytest.raises(DataError, match=r"cannot be read.*reasoning_gym:leg_counting\?size=500&seed=1"):
        parsed("reasoning_gym:leg_counting?size")


@pytest.mark.reasoning_gym
def test_a_task_gives_rows_with_what_its_scorer_needs(tokenizer):
    name = "reasoning_gym:leg_counting?size=5&seed=1"
    table = read_table(name)
    assert (len(table), table.data_source) == (5, "leg_counting")
    assert read_table(name).columns == table.columns
    unseeded = "reasoning_gym:leg_counting?size=3"
    assert read_table(unseeded).columns == read_table(f"{unseeded}&seed=0").columns
    batch = load_prompts([name], Data(), tokenizer)
    entry = batch.object("reasoning_gym")[2]
    assert (entry["task"], entry["question"]) == ("leg_counting", batch.object("prompt")[2])
    assert entry["answer"] == batch.object("answer")[2]


@pytest.mark.reasoning_gym
@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("leg_counting2", "no task 'leg_counting2'", "Did you mean 'leg_counting'"),
        ("leg_counting?sise=3", "no setting 'sise'", "Did you mean 'size'"),
        ("leg_counting?min_animals=0", "refuses these settings", "min_animals"),
    ],
)
def test_what_the_package_does_not_have_is_told(name, found, remedy):
    with pytest.raises(DataError, match=f"{found}.*{remedy}"):
        read_table(f"reasoning_gym:{name}")
