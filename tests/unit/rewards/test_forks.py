"""A process that a reward function forks never answers in place of the function's own process."""

import os

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.rewards.scorer import RewardScorer

FORKING = """
import gc, os
from multiprocessing.connection import Connection

def returns(completions, **columns):
    child = os.fork()
    if child == 0:
        return [-1.0] * len(completions)
    os.waitpid(child, 0)
    return [float(len(text)) for text in completions]

def raises(completions, **columns):
    if os.fork() == 0:
        raise OSError("the log is full")
    return [float(len(text)) for text in completions]

async def waits(completions, **columns):
    if os.fork() == 0:
        return [-1.0] * len(completions)
    return [float(len(text)) for text in completions]

def of_one(data_source, solution_str, ground_truth):
    if os.fork() == 0:
        raise SystemExit
    return float(len(solution_str))

class Judge:
    def __init__(self):
        child = os.fork()
        if child:
            os.waitpid(child, 0)

    def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]

def writes(completions, **columns):
    for found in gc.get_objects():
        if isinstance(found, Connection) and not found.closed:
            found.send((7, None))
    return [1.0] * len(completions)
"""


@pytest.fixture
def forking(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    return tmp_path / "forking.py"


@pytest.mark.parametrize(
    ("names", "processes"), [(["returns", "Judge"], 0), (["returns", "raises", "waits", "of_one", "Judge"], 1)]
)
def test_a_forked_process_never_answers_for_the_function(forking, tmp_path, names, processes):
    us, returned = os.getpid(), tmp_path / "returned"
    scorer = RewardScorer(Reward(functions=[f"{forking}:{name}" for name in names], processes=processes))
    prompts = [f"p{index // 2}" for index in range(40)]
    for step in range(3):
        completions = ["x" * (index + 50 * step) for index in range(40)]
        scored = scorer.score(prompts, completions, {})
        if os.getpid() != us:
            returned.touch()
            os._exit(9)  # it must not go on as a second pytest
        expected = [float(len(text)) for text in completions]
        assert {name: column.tolist() for name, column in scored.columns.items()} == dict.fromkeys(names, expected)
        assert scored.failures == []
    assert not returned.exists()  # `returns` and `Judge` wait for their children


def test_a_reply_to_another_request_is_an_error_that_names_the_function(forking):
    scorer = RewardScorer(Reward(functions=[f"{forking}:writes"], processes=1))
    with pytest.raises(RewardError, match="function 'writes' sent reply 7 instead of reply 1") as caught:
        scorer.score(["p"], ["c"], {})
    assert "os._exit()" in caught.value.remedy
