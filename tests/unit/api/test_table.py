"""Tables and rows of metrics: a name that they lack leads to similar ones."""

import pickle

import pytest

from hybridflow.api.callbacks import after_step
from hybridflow.api.table import Row, Table
from hybridflow.errors import HybridflowError, UnknownName

METRICS = {"step": 1, "critic/score/mean": 0.5, "critic/rewards/mean": 0.5, "critic/rewards/max": 1.0}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("critic/reward/mean", "Did you mean 'critic/rewards/mean', 'critic/rewards/max' or 'critic/score/mean'?"),
        ("score", "Did you mean 'critic/score/mean'?"),
        ("zzz", "There are: step, critic/score/mean, critic/rewards/mean, critic/rewards/max."),
    ],
)
def test_an_unknown_name_leads_to_similar_ones_wherever_it_is_asked_for(name, remedy):
    table = Table([METRICS])

    def in_callback(step, metrics):
        metrics[name]

    for ask in (
        lambda: table[name],
        lambda: table[0][name],
        lambda: after_step(in_callback)(1, {**METRICS}),
    ):
        with pytest.raises(UnknownName) as found:
            ask()
        assert found.value.message == f"There is no '{name}'." and found.value.remedy == remedy
        assert isinstance(found.value, KeyError) and str(found.value) == f"There is no '{name}'. {remedy}"
    assert table[0].get(name) is None and table["critic/score/mean"] == [0.5]


def test_an_empty_row_says_so_and_the_error_crosses_processes():
    with pytest.raises(UnknownName, match=r"There is no 'acc'\. It is empty\.") as found:
        Row()["acc"]
    again = pickle.loads(pickle.dumps(found.value))
    assert isinstance(again, HybridflowError) and (again.message, again.remedy) == (
        "There is no 'acc'.",
        "It is empty.",
    )
