"""The actor: samples and updates of one set of weights, in the right order."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.versions import token_versions
from hybridflow.config.algorithm import KL, Algorithm, Correction, CorrectionLevel, KLPlacement, OldLogprobs
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.config.training import Optimizer
from hybridflow.engines.training.interface import Part
from hybridflow.errors import BatchError, ConfigError, EngineError, StaleWeightsError
from hybridflow.workers.actor import ActorWorker
from tests.toys import numbers_like, sequences
from tests.unit.engines.training.engines import largest_difference, weights
from tests.unit.workers.roles import GRPO, SAMPLES, actor, prompts, sampled

RESTRICTED = [Sampling(top_p=0.9), Sampling(top_k=5)]


def moved(batch: Batch, by: float) -> Batch:
    """Samples whose rollout reports lower log-probabilities than the actor does."""
    logprobs = batch.tokens("rollout_logprobs")
    return batch.with_columns(tokens={"rollout_logprobs": logprobs.like(logprobs.values - by)})


def without_old_logprobs(batch: Batch) -> Batch:
    return batch.only([name for name in batch.columns if name != "old_logprobs"])


def test_generating_after_an_update_without_publishing_is_refused(toy_dir):
    worker = actor(toy_dir())
    worker.update(sampled(worker))
    with pytest.raises(StaleWeightsError, match="not published.*publish_weights"):
        worker.generate(prompts())
    worker.supervised_step(sequences())
    with pytest.raises(StaleWeightsError, match="not published"):
        worker.generate(prompts())


def test_an_update_that_fails_half_way_leaves_nothing_to_generate_from(toy_dir):
    worker = actor(toy_dir(), minibatch_sequences=3)
    batch = sampled(worker)
    advantages = batch.tokens("advantages")
    broken = advantages.values.clone()
    broken[-1] = float("nan")
    with pytest.raises(EngineError, match="norm is nan"):
        worker.update(batch.with_columns(tokens={"advantages": advantages.like(broken)}))
    with pytest.raises(StaleWeightsError, match="not published"):
        worker.generate(prompts())


def test_published_weights_are_those_that_sample(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(sampling=Sampling(temperature=0.7)))
    before = sampled(worker)
    assert before.meta["temperature"] == 0.7
    worker.update(before)
    worker.publish_weights(1)
    after = sampled(worker)
    assert before.row("weight_version").unique().tolist() == [0]
    assert after.row("weight_version").unique().tolist() == [1]
    gap = after.tokens("old_logprobs").values - after.tokens("rollout_logprobs").values
    assert float(gap.abs().max()) < 1e-4
    again = before.join(worker.logprobs(before)).tokens("old_logprobs").values
    assert float((again - before.tokens("old_logprobs").values).abs().max()) > 1e-3


def test_samples_of_other_weights_are_refused(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    worker.update(batch)
    worker.publish_weights(1)
    with pytest.raises(StaleWeightsError, match=r"versions \[0\], but the actor is at version 1") as caught:
        worker.update(batch)
    assert "publish the weights after each update" in caught.value.remedy


TENTH, DOUBLE = (Rollout(sampling=Sampling(temperature=value)) for value in (0.1, 2.0))


@pytest.mark.parametrize(
    ("rollout", "by", "refused"),
    [
        (Rollout(), 0.05, r"differs by .*e-02, more than 0\.001"),
        (Rollout(max_logprob_difference=0.1), 0.05, None),
        (TENTH, 0.009, None),
        (TENTH, 0.02, r"more than 0\.01 .*divided by the temperature 0\.1"),
        (DOUBLE, 0.002, r"more than 0\.001\. Either"),
    ],
)
@pytest.mark.parametrize("has_old", [True, False])
def test_the_first_update_refuses_a_rollout_that_differs_from_training(toy_dir, rollout, by, refused, has_old):
    """Without `old_logprobs` its own forward pass is compared. The bound grows with the inverse of the temperature."""
    worker = actor(toy_dir(), rollout=rollout)
    batch = moved(sampled(worker), by)
    batch = batch if has_old else without_old_logprobs(batch)
    if refused is None:
        found = worker.update(batch)["training/rollout_logprobs_diff_max"].value
        assert found == pytest.approx(by, abs=1e-3)
        return
    with pytest.raises(StaleWeightsError, match=refused) as caught:
        worker.update(batch)
    assert "rollout.engine=transformers" in caught.value.remedy
    assert "rollout.max_logprob_difference" in caught.value.remedy


def evaluated(worker: ActorWorker) -> Batch:
    """Samples of an evaluation with advantages, as if the policy were to learn from them."""
    given = prompts()
    drawn = given.join(worker.generate(given, purpose="eval"))
    advantages = numbers_like(drawn.tokens("response_ids"), seed=0)
    return drawn.join(worker.logprobs(drawn)).with_columns(tokens={"advantages": advantages})


def test_restricted_samples_of_an_evaluation_are_named_where_they_disagree(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(eval_sampling=Sampling(top_k=2)))
    with pytest.raises(StaleWeightsError, match="drawn with top_p or top_k") as caught:
        worker.update(evaluated(worker))
    assert "weights" not in caught.value.message
    assert "rollout.eval_sampling.top_k=0" in caught.value.remedy


def test_samples_of_another_temperature_are_refused_at_every_update_however_little_they_disagree(toy_dir):
    warmer = Rollout(eval_sampling=Sampling(temperature=1.001), max_logprob_difference=9.0)
    worker = actor(toy_dir(), rollout=warmer)
    worker.update(sampled(worker))
    worker.publish_weights(1)
    batch, before = evaluated(worker), weights(worker.engine)
    with pytest.raises(StaleWeightsError, match=r"drawn at temperature 1\.001, .* trained at 1\.0\.") as caught:
        worker.update(batch)
    assert largest_difference(before, weights(worker.engine)) == 0.0
    assert "rollout.eval_sampling.temperature" in caught.value.remedy
    assert "`rollout: Sampler`" in caught.value.remedy


def test_only_the_first_update_is_compared_and_all_are_reported(toy_dir):
    worker = actor(toy_dir())
    worker.update(sampled(worker))
    worker.publish_weights(1)
    metrics = worker.update(moved(sampled(worker), 0.05))
    assert metrics["training/rollout_logprobs_diff_max"].value > 0.04


@pytest.mark.parametrize("sampling", RESTRICTED, ids=["top_p", "top_k"])
def test_restricted_sampling_is_not_compared_and_a_warning_advises_a_correction(toy_dir, caplog, sampling):
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        worker = actor(toy_dir(), rollout=Rollout(sampling=sampling))
    (record,) = [record for record in caplog.records if "rollout.sampling.top_p" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "correct" in record.getMessage()
    worker.update(moved(sampled(worker), 0.5))
    caplog.clear()
    actor(toy_dir(), rollout=Rollout(eval_sampling=sampling))
    assert not [record for record in caplog.records if record.name.startswith("hybridflow.workers")]


@pytest.mark.parametrize(("minibatch", "epochs"), [(6, 1), (2, 1), (4, 2), (6, 3)])
def test_minibatches_are_consecutive_rows_and_every_epoch_sees_them_all(toy_dir, minibatch, epochs):
    together, by_hand = actor(toy_dir(), minibatch_sequences=minibatch, epochs=epochs), actor(toy_dir())
    batch = sampled(together)
    together.update(batch)
    for _ in range(epochs):
        for start in range(0, len(batch), minibatch):
            by_hand.update(batch.slice(start, min(start + minibatch, len(batch))))
    assert largest_difference(weights(together.engine), weights(by_hand.engine)) == 0.0


def test_a_loss_is_averaged_over_optimizer_steps(toy_dir):
    still = Optimizer(learning_rate=0.0)
    together, by_hand = actor(toy_dir(), minibatch_sequences=3, optimizer=still), actor(toy_dir(), optimizer=still)
    batch = sampled(together)
    parts = [by_hand.update(batch.slice(start, start + 3))["actor/pg_loss"].value for start in (0, 3)]
    assert together.update(batch)["actor/pg_loss"].value == pytest.approx(sum(parts) / 2, abs=1e-6)


def test_several_steps_without_old_logprobs_are_refused(toy_dir):
    worker = actor(toy_dir(), epochs=2)
    batch = sampled(worker)
    with pytest.raises(ConfigError, match=r"2 optimizer steps per batch.*actor\.epochs=1"):
        worker.update(without_old_logprobs(batch))


def test_the_rollouts_log_probabilities_as_old_ones_are_compared_in_the_first_optimizer_step(toy_dir):
    algorithm = Algorithm(advantage="grpo", old_logprobs=OldLogprobs.rollout)
    worker = actor(toy_dir(), algorithm=algorithm, minibatch_sequences=3, epochs=2)
    batch = sampled(worker)
    absent = without_old_logprobs(batch)
    metrics = worker.update(absent)
    assert 0.0 < metrics["training/rollout_logprobs_diff_max"].value < 1e-4
    assert metrics["actor/ppo_kl"].value != 0.0
    stale = actor(toy_dir(), algorithm=algorithm, minibatch_sequences=3, epochs=2)
    with pytest.raises(StaleWeightsError, match="differs by 5.00e-01, more than 0.001"):
        stale.update(moved(sampled(stale).only(absent.columns), 0.5))


def test_samples_of_a_policy_that_has_learnt_since_need_old_logprobs(toy_dir):
    worker = actor(toy_dir())
    worker.update(sampled(worker))
    worker.publish_weights(version=1)
    batch = sampled(worker)
    worker.supervised_step(batch)
    with pytest.raises(
        ConfigError, match=r"updated after its samples were drawn, but the batch has no old_logprobs"
    ) as caught:
        worker.update(without_old_logprobs(batch))
    assert "Call actor.logprobs before" in caught.value.remedy
    assert worker.update(batch)["actor/ppo_kl"].value != 0.0


def test_an_error_names_the_setting_that_needs_a_missing_column(toy_dir, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def tied(logprobs, ref_logprobs):\n    return (logprobs - ref_logprobs).square()\n")
    penalty = KL(placement=KLPlacement.loss)
    for setting, found in (
        ({"policy_loss": f"{file}:tied"}, r"policy_loss=.*own\.py:tied.*ref_logprobs"),
        ({"kl": penalty}, r"algorithm\.kl\.placement=loss.*ref_logprobs"),
    ):
        worker = actor(toy_dir(), algorithm=Algorithm(advantage="grpo", **setting))
        with pytest.raises(BatchError, match=found):
            worker.update(sampled(worker))


def test_combined_advantages_are_those_of_the_reward_less_those_of_the_cost(toy_dir):
    ids = sequences().tokens("response_ids")
    own, other = (Batch.of(tokens={"advantages": numbers_like(ids, seed=seed)}) for seed in (1, 2))
    found = actor(toy_dir()).combine_advantages(own, other, 0.7).tokens("advantages").values
    expected = (own.tokens("advantages").values - 0.7 * other.tokens("advantages").values) / 1.7
    torch.testing.assert_close(found, expected)


def test_rewards_are_reported_per_sequence(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    batch = batch.join(worker.advantages(batch.with_columns(rows={"scores": torch.arange(6.0)})))
    metrics = worker.update(batch)
    assert [metrics[f"critic/rewards/{part}"].value for part in ("mean", "max", "min")] == [2.5, 5.0, 0.0]
    assert {"critic/advantages/mean", "actor/grad_norm", "actor/lr"} <= metrics.keys()
    metrics = worker.update(batch.with_columns(rows={"failed": torch.arange(6) < 3}))
    assert [metrics[f"critic/rewards/{part}"].value for part in ("mean", "max", "min")] == [4.0, 5.0, 3.0]


def test_evaluation_has_its_own_settings_and_draws_the_same_each_time(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(eval_sampling=Sampling(temperature=0.999)))
    drawn = [worker.generate(prompts(), purpose) for purpose in ("train", "eval", "eval", "greedy")]
    assert [batch.meta["temperature"] for batch in drawn[:3]] == [1.0, 0.999, 0.999]
    train, first, second, greedy = (batch.tokens("response_ids").padded(0, length=8) for batch in drawn)
    assert torch.equal(first, second)
    assert not torch.equal(train, first)
    assert torch.equal(greedy[::SAMPLES], greedy[1::SAMPLES])


def test_a_restored_actor_must_publish_and_then_goes_on_the_same(toy_dir, tmp_path):
    algorithm = Algorithm(
        advantage="grpo", kl=KL(placement=KLPlacement.reward, coefficient=0.3, target=0.1, horizon=60)
    )
    first, second = actor(toy_dir(), algorithm=algorithm), actor(toy_dir(seed=1), algorithm=algorithm)
    batch = sampled(first)
    scored = batch.with_columns(
        rows={"scores": torch.arange(6.0)}, tokens={"ref_logprobs": numbers_like(batch.tokens("old_logprobs"), seed=5)}
    )
    first.update(scored.join(first.advantages(scored)))
    first.save(tmp_path)
    second.load(tmp_path)
    with pytest.raises(StaleWeightsError):
        second.generate(prompts())
    for worker in (first, second):
        worker.publish_weights(1)
    assert second.state() == first.state() != {"coefficient": 0.3}
    left, right = sampled(first, seed=3), sampled(second, seed=3)
    for name in ("response_ids", "rollout_logprobs", "old_logprobs"):
        assert torch.equal(left.tokens(name).values, right.tokens(name).values), name


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "asleep"])
def test_offloaded_weights_and_optimizer_wait_outside_the_device_after_every_call(toy_dir, tmp_path, sleep):
    worker = actor(toy_dir(), rollout=Rollout(sleep=sleep), offload_parameters=True, offload_optimizer=True)
    for call in (
        lambda: worker.update(sampled(worker)),
        lambda: worker.publish_weights(1),
        lambda: worker.generate(prompts()),
        lambda: worker.save(tmp_path),
        lambda: worker.load(tmp_path),
    ):
        call()
        assert worker.engine.away == {Part.parameters, Part.optimizer}


def test_logprobs_include_squared_probabilities_if_the_estimator_reads_them(toy_dir):
    plain, asked = actor(toy_dir()), actor(toy_dir(), algorithm=Algorithm(advantage="optimal_token_baseline"))
    batch = sequences()
    found = asked.logprobs(batch)
    assert plain.logprobs(batch).columns == ["old_logprobs"]
    assert found.columns == ["old_logprobs", "sum_pi_squared"]
    assert float(found.tokens("sum_pi_squared").values.min()) >= 1 / 64 - 1e-6  # of 64 tokens
    assert torch.equal(found.tokens("old_logprobs").values, plain.logprobs(batch).tokens("old_logprobs").values)


def stale(batch: Batch, num_tokens: int) -> Batch:
    """Samples whose first tokens are said to be of earlier weights, under which they had other probabilities."""
    logprobs = batch.tokens("rollout_logprobs")
    place = torch.arange(len(logprobs.values)) - logprobs.offsets[:-1].repeat_interleave(logprobs.lengths)
    runs = [[[-1, 0]] + [[0, num_tokens]] * (length > num_tokens) for length in logprobs.lengths.tolist()]
    moved = logprobs.values - 0.5 * (place < num_tokens)
    return batch.with_columns(
        tokens={
            "rollout_logprobs": logprobs.like(moved),
            "version_runs": Ragged.from_rows(list(map(torch.tensor, runs))),
        }
    )


@pytest.mark.parametrize("correction", [Correction(), Correction(weights=CorrectionLevel.token)])
def test_only_tokens_of_the_trained_version_are_compared_with_the_policy(toy_dir, correction):
    worker = actor(toy_dir(), algorithm=Algorithm(correction=correction))
    batch = sampled(worker)
    found = worker.update(stale(batch, 2))["training/rollout_logprobs_diff_max"].value
    assert found < 1e-3 and int(batch.tokens("response_ids").lengths.max()) > 2
    other = actor(toy_dir(), algorithm=Algorithm(correction=correction))
    with pytest.raises(StaleWeightsError, match="disagree"):
        other.update(stale(batch, 2).with_columns(tokens={"version_runs": batch.tokens("version_runs")}))


def test_a_batch_without_tokens_of_the_trained_version_does_not_pass_for_the_comparison(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    found = worker.update(stale(batch, 10**6))
    assert not [name for name in found if name.startswith("training/rollout_")], "nothing was compared"
    worker.publish_weights(0)
    with pytest.raises(StaleWeightsError, match="disagree"):
        worker.update(moved(sampled(worker), 0.05))


def test_the_age_of_each_token_decides_what_the_policy_is_compared_with(toy_dir):
    """Tokens of the weights of two versions before, and tokens of the trained ones, which have no mismatch."""
    correction = Correction(weights=CorrectionLevel.token, upper=10.0)
    still = {"optimizer": Optimizer(learning_rate=0.0)}
    algorithm = replace(GRPO, old_logprobs=OldLogprobs.interpolate, correction=correction)
    worker = actor(toy_dir(), algorithm=algorithm, **still)
    batch = stale(sampled(worker), 2)
    runs = batch.tokens("version_runs")
    older = torch.where(runs.values == torch.tensor([-1, 0]), torch.tensor([-2, 0]), runs.values)
    batch = batch.with_columns(tokens={"version_runs": runs.like(older)})
    found = worker.update(batch.only([name for name in batch.columns if name != "old_logprobs"]))
    # half of a difference of 0.5 is corrected by the weights, the other half by the ratio
    assert found["actor/ratio_max"].value == pytest.approx(math.exp(0.25), rel=1e-3)
    versions = token_versions(batch.tokens("version_runs"), batch.tokens("response_ids").lengths).values
    share = float((versions == -2).float().mean())
    expected = share * math.exp(0.25) + 1 - share
    assert found["rollout_corr/rollout_is_mean"].value == pytest.approx(expected, rel=1e-3)
    assert found["training/rollout_logprobs_diff_max"].value < 1e-3
