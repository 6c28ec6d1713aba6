"""The same run on every engine and backend: local and Ray give the same bits, both rollouts the same probabilities."""

import math
from collections.abc import Callable

import pytest

from hybridflow.controller import Backend
from tests.distributed.runs import Row, reproducible, rows_of_run, small_run

ALGORITHMS = {"ppo": ["algorithm=ppo"], "grpo": ["algorithm=grpo", "rollout.samples_per_prompt=4"]}
LOSSES = {"ppo": ["actor/pg_loss", "critic/vf_loss"], "grpo": ["actor/pg_loss"]}
ALWAYS = ["actor/entropy", "actor/grad_norm", "critic/score/mean", "rewards/exact_match/mean"]
EVALUATED = "val-core/held_out/acc/mean@2"
RAY = "trainer.backend=ray"

Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function: an algorithm and settings -> the metrics of a run of four steps."""

    def metrics(algorithm: str, *settings: str) -> list[Row]:
        folder = tmp_path_factory.mktemp(algorithm)
        words = ["trainer={total_steps: 4, save_every: 0, eval_every: 2}", "rollout.eval_samples_per_prompt=2"]
        return rows_of_run(folder / "run", [*small_run(folder), *ALGORITHMS[algorithm], *words, *settings])

    return metrics


@pytest.fixture(scope="module")
def plain(run: Run) -> dict[str, list[Row]]:
    """Runs on the local backend with the transformers rollout, by algorithm."""
    return {algorithm: run(algorithm) for algorithm in ALGORITHMS}


def assert_sound(rows: list[Row], algorithm: str) -> None:
    """Four steps whose losses are numbers, with scores, and a rollout that agrees with training."""
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [EVALUATED in row for row in rows] == [True, False, True, False, True]
    for row in rows[1:]:
        for name in [*LOSSES[algorithm], *ALWAYS]:
            assert math.isfinite(row[name]), name
        assert row["training/rollout_logprobs_diff_max"] < 1e-4  # float32; measured: 5e-6
    assert sum(row["actor/grad_norm"] > 0.0 for row in rows[1:]) > 1  # a step whose groups all agree has none


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_is_sound(plain, algorithm):
    assert_sound(plain[algorithm], algorithm)


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_run_with_vllm_is_sound(run, plain, algorithm):
    rows = run(algorithm, "rollout.engine=vllm")
    assert_sound(rows, algorithm)
    for row, other in zip(rows[1:], plain[algorithm][1:], strict=True):
        assert set(row) == set(other)
    assert abs(rows[1]["critic/score/mean"] - plain[algorithm][1]["critic/score/mean"]) < 0.6  # other draws, one model


@pytest.mark.slow  # the quick cases of the same rule: tests/parity/test_rollout_parity.py
@pytest.mark.vllm
def test_both_rollouts_give_the_same_greedy_answers(run):
    greedy = ["rollout.eval_sampling.temperature=0", "rollout.eval_samples_per_prompt=1", "trainer.total_steps=1"]
    found = [run("grpo", *greedy, engine)[0] for engine in ("rollout.engine=transformers", "rollout.engine=vllm")]
    assert found[0] == found[1]


@pytest.mark.vllm
def test_a_run_with_vllm_goes_on_with_the_same_bits(tmp_path):
    words = [*small_run(tmp_path), "rollout.engine=vllm", "algorithm=grpo"]
    whole = rows_of_run(tmp_path / "whole", words)
    rest = rows_of_run(tmp_path / "rest", [*words, f"trainer.resume={tmp_path}/whole/checkpoints/step_2"])
    assert reproducible(whole)[-2:] == reproducible(rest)


@pytest.mark.ray
@pytest.mark.slow  # the quick case is that of two pools, below
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ray_gives_the_same_bits_as_the_local_backend(ray_backend: Backend, run, plain, algorithm):
    assert reproducible(run(algorithm, RAY)) == reproducible(plain[algorithm])


@pytest.mark.ray
def test_two_pools_give_the_same_bits_as_one(ray_backend: Backend, run, plain):
    pools = "placement.pools={policy: {devices: 1}, judges: {devices: 1}}"
    roles = "placement.roles={actor: policy, rollout: policy, critic: judges, reward: judges}"
    rows = run("ppo", RAY, "trainer.devices=2", pools, roles)
    assert reproducible(rows) == reproducible(plain["ppo"])
