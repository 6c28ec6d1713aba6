"""Estimators and losses by name, and of the user's own, in whole runs: on one device and on two, right and wrong."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from tests.distributed.runs import Ended, metric_rows, run_here, small_run

OWN = """
import torch

from hybridflow.algorithms.advantages.decoupled import decoupled
from hybridflow.algorithms.advantages.optimal_token_baseline import optimal_token_baseline


def mine(scores, mask, *, shift=0.5):
    return (scores[:, None] - shift) * mask


def reinforce(logprobs, advantages):
    return -advantages * logprobs


def everything(rewards, old_logprobs, sum_pi_squared, components, mask, group_ids):
    by_token = optimal_token_baseline(rewards, old_logprobs, sum_pi_squared, mask, group_ids)
    return by_token + decoupled(components, mask, group_ids)


def of_rows(scores, mask):
    return scores


def unknown(scores, mask, gruop_ids):
    return scores


def even(prompts, completions, **columns):
    return [None if text == "" else float(len(text) % 2) for text in completions]
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
        (["algorithm.advantage={}:mien"], "there is no 'mien' in it", "Did you mean 'mine'?"),
        (["algorithm.advantage={}:unknown"], "its parameter 'gruop_ids'", "Did you mean 'group_ids'?"),
        (
            ["algorithm.policy_loss={}:unknown"],
            "unknown(scores, mask, gruop_ids)",
            "Parameters may be: logprobs, entropy",
        ),
        (
            ["algorithm.advantage={}:mine", "algorithm.advantage_settings.shfit=1"],
            "no setting 'algorithm.advantage_settings.shfit'",
            "Did you mean 'shift'?",
        ),
        (
            ["algorithm.advantage={}:mine", "algorithm.advantage_settings.shift=much"],
            "algorithm.advantage_settings.shift=much is a str",
            "Give a number, as its default 0.5 is.",
        ),
        (
            ["algorithm=gdpo", "algorithm.advantage_settings.weights=[1.0,2.0]"],
            "weights=[1.0, 2.0] for 1 rewards: exact_match",
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
    assert ended.status == 2, ended.said
    message, _, advice = ended.words.partition("What to do:")
    assert found in message
    assert remedy in advice
    assert "Traceback" not in ended.said
    assert not (tmp_path / "run").exists()


def test_an_estimator_and_a_loss_of_the_users_own_train(attempt, tmp_path):
    own = [
        "algorithm.advantage={}:mine",
        "algorithm.advantage_settings.shift=0.25",
        "algorithm.policy_loss={}:reinforce",
    ]
    ended = attempt(*own)
    assert ended.status == 0, ended.said
    rows = metric_rows(tmp_path / "run")
    for row in rows[-2:]:
        assert row["actor/grad_norm"] > 0
        assert {row["critic/advantages/max"], row["critic/advantages/min"]} <= {0.75, -0.25}


def test_an_estimator_that_answers_for_rows_ends_the_run(attempt):
    ended = attempt("algorithm.advantage={}:of_rows")
    assert ended.status != 0
    assert "own.py:of_rows returned a value of shape [16]" in ended.words
    assert "a number for each token" in ended.words
    assert "Traceback" not in ended.said


@pytest.mark.slow
@pytest.mark.ray
def test_two_devices_estimate_what_one_does_from_every_column(ray_backend: Backend, attempt, tmp_path):
    words = ["algorithm.advantage={}:everything", "reward.functions=[exact_match,{}:even]"]
    words += ["actor.optimizer.epsilon=1e-3"]
    found = []
    for folder, layout in (("one", []), ("two", ["trainer={devices: 2, backend: ray}", "actor.engine=fsdp"])):
        ended = attempt(*words, *layout, folder=folder)
        assert ended.status == 0, ended.said
        found.append(metric_rows(tmp_path / folder)[-1])
    one, two = found
    assert one["critic/advantages/max"] > one["critic/advantages/min"]
    for name in ("critic/advantages/max", "critic/advantages/min", "critic/advantages/mean", "actor/grad_norm"):
        # float32 sums in another order, over two steps
        assert math.isclose(one[name], two[name], rel_tol=2e-3, abs_tol=2e-3), name
