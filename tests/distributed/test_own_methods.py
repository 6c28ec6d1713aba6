"""Estimators and losses by name, and of the user's own, that cannot be used end the run in words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.runs import Ended, assert_refused, run_here, small_run

OWN = """
def of_rows(scores, mask):
    return scores


def unknown(scores, mask, gruop_ids):
    return scores
"""

Try = Callable[..., Ended]


@pytest.fixture
def attempt(tmp_path: Path) -> Try:
    """A function: settings -> how a run of two steps with them ended; `{}` is the file of functions."""
    file = tmp_path / "own.py"
    file.write_text(OWN)

    def run(*settings: str, folder: str = "run") -> Ended:
        words = ["algorithm=grpo", "trainer={total_steps: 2, save_every: 0, eval_every: 0}"]
        given = [word.replace("{}", str(file)) for word in settings]
        return run_here([*small_run(tmp_path), *words, f"trainer.run_dir={tmp_path}/{folder}", *given])

    return run


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        (["algorithm.advantage={}:unknown"], "its parameter 'gruop_ids'", "Did you mean 'group_ids'?"),
        (["algorithm.policy_loss={}:unknown"], "unknown(scores, mask, gruop_ids)", "logprobs, entropy, mask"),
        (
            ["algorithm=gdpo", "algorithm.advantage_settings.weights=[1.0,2.0]"],
            "weights=[1.0, 2.0] has 2 numbers, but there is 1 reward: exact_match",
            "Give one weight per reward",
        ),
        (
            ["algorithm=gdpo", "algorithm.kl.placement=reward"],
            "the penalty would be lost",
            "algorithm.kl.placement=loss",
        ),
    ],
)
def test_a_method_that_cannot_be_called_is_told_before_anything_starts(attempt, tmp_path, settings, found, remedy):
    ended = attempt(*settings)
    assert_refused(ended, found, remedy)
    assert not (tmp_path / "run").exists()


def test_an_estimator_that_answers_for_rows_ends_the_run(attempt):
    ended = attempt("algorithm.advantage={}:of_rows")
    assert ended.status != 0
    assert "own.py:of_rows returned a value of shape [16]" in ended.words
    assert "a number for each token" in ended.words
    assert "Traceback" not in ended.said
