"""Scorers of functions in files of their own."""

import pytest

from hybridflow.config.reward import Reward
from hybridflow.rewards.scorer import RewardScorer


@pytest.fixture
def make_scorer(tmp_path):
    """A function: source of a reward file and settings -> a scorer of its functions, by default in this process."""

    def make(text, names=("f",), **settings):
        (tmp_path / "reward.py").write_text(text)
        settings = {"processes": 0, **settings}
        return RewardScorer(Reward(functions=[f"{tmp_path}/reward.py:{name}" for name in names], **settings))

    return make
