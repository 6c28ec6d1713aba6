"""Whole runs in which the rollout really differs from training, and in which responses break off."""

import math

import pytest

from tests.distributed.runs import rows_of_run, small_run

STEPS = ["trainer={total_steps: 2, save_every: 0, eval_every: 0, samples_every: 0}", "algorithm=grpo"]
FEW_TOKENS = "rollout.sampling.top_k=4"
"""The rollout draws from the four most probable tokens, and says log-probabilities of those alone."""


def steps_of_run(folder, *settings):
    """Metrics of each step of a small run of GRPO."""
    rows = rows_of_run(folder / "run", [*small_run(folder), *STEPS, *settings])
    return [row for row in rows if "actor/grad_norm" in row]


def test_weights_make_up_for_a_rollout_that_draws_from_few_tokens(tmp_path):
    rows = steps_of_run(tmp_path, FEW_TOKENS, "algorithm.correction={weights: token, upper: 2.0}")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] > 1e-3
        # The four share the probability of the rest among them: training finds each less likely.
        assert row["rollout_corr/kl"] > 1e-4
        assert row["rollout_corr/k3_kl"] > 1e-5
        assert row["rollout_corr/ppl_ratio"] > 1.0
        assert 0.0 < row["rollout_corr/rollout_is_mean"] < 1.0
        assert row["rollout_corr/rollout_is_max"] <= 1.0 + 1e-4
        assert 0.0 < row["rollout_corr/rollout_is_eff_sample_size"] < 1.0
        assert math.isfinite(row["actor/grad_norm"])
        assert row["actor/grad_norm"] > 0


def test_a_rollout_that_agrees_has_weights_of_one(tmp_path):
    rows = steps_of_run(tmp_path, "algorithm.correction={weights: sequence, normalize: true, veto: 1.0e-4}")
    for row in rows:
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        assert row["training/rollout_logprobs_diff_max"] < 1e-3


def test_two_policies_are_compared_where_something_is_rejected(tmp_path):
    words = ["algorithm=ppo", "algorithm.old_logprobs=rollout", FEW_TOKENS]
    rows = steps_of_run(tmp_path, *words, "algorithm.correction={reject: geometric, reject_upper: 1.5}")
    for row in rows:
        assert "timing_s/old_log_prob" in row
        assert row["training/rollout_probs_diff_max"] > 1e-3
        assert row["rollout_corr/rollout_rs_seq_masked_fraction"] < 1.0
        assert row["rollout_corr/kl"] > 1e-4
        assert math.isfinite(row["actor/grad_norm"])


def test_one_optimizer_step_needs_no_pass_of_its_own_and_learns_the_same(tmp_path):
    found = []
    for old in ("recompute", "auto"):
        (tmp_path / old).mkdir()
        rows = steps_of_run(tmp_path / old, f"algorithm.old_logprobs={old}", "actor={minibatch_size: null, epochs: 1}")
        assert all(("timing_s/old_log_prob" in row) is (old == "recompute") for row in rows)
        kept = [
            {n: v for n, v in row.items() if n.startswith(("actor/", "critic/", "training/rollout"))} for row in rows
        ]
        found.append(kept)
    assert found[0] == found[1]


def test_responses_that_break_off_can_be_left_out(tmp_path):
    rows = steps_of_run(tmp_path, "data.max_response_tokens=3", "algorithm.mask_truncated=true")
    for row in rows:
        assert row["actor/truncated_fraction"] == pytest.approx(row["response_length/clip_ratio"], abs=1e-6)
        assert 0.0 < row["actor/truncated_fraction"] < 1.0
        assert math.isfinite(row["actor/grad_norm"])
