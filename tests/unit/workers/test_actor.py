"""The actor: samples and updates of one set of weights, in the right order."""

import logging

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement, OldLogprobs
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.config.training import Optimizer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.interface import Part
from hybridflow.errors import BatchError, ConfigError, EngineError, StaleWeightsError
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.rollout import RolloutSetup
from tests.toys import numbers_like, sequences
from tests.unit.engines.training.engines import largest_difference, weights
from tests.unit.workers.roles import PROMPTS, SAMPLES, actor, prompts, sampled, setup_of

RESTRICTED = [Sampling(top_p=0.9), Sampling(top_k=5)]


def moved(batch, by: float):
    """Samples whose rollout says other log-probabilities than the actor."""
    logprobs = batch.tokens("rollout_logprobs")
    return batch.with_columns(tokens={"rollout_logprobs": logprobs.like(logprobs.values - by)})


def test_samples_carry_what_the_actor_thinks_of_them(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(sampling=Sampling(temperature=0.7)))
    batch = sampled(worker)
    assert batch.meta["temperature"] == 0.7
    gap = batch.tokens("old_logprobs").values - batch.tokens("rollout_logprobs").values
    assert float(gap.abs().max()) < 1e-4


def test_generating_after_an_update_without_publishing_is_refused(toy_dir):
    worker = actor(toy_dir())
    worker.update(sampled(worker))
    with pytest.raises(StaleWeightsError, match="not published") as caught:
        worker.generate(prompts())
    assert "publish_weights" in caught.value.remedy
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
    worker = actor(toy_dir())
    before = sampled(worker)
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
    with pytest.raises(StaleWeightsError, match=r"versions \[0\], the actor is at 1") as caught:
        worker.update(batch)
    assert "publish after each update" in caught.value.remedy


def test_a_run_stops_at_its_first_update_when_rollout_and_training_disagree(toy_dir):
    worker = actor(toy_dir())
    with pytest.raises(StaleWeightsError, match=r"differs by .*e-02, more than 0\.001") as caught:
        worker.update(moved(sampled(worker), 0.05))
    assert "rollout.engine=transformers" in caught.value.remedy
    assert "rollout.max_logprob_difference" in caught.value.remedy


def test_the_bound_of_the_difference_can_be_set(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(max_logprob_difference=0.1))
    metrics = worker.update(moved(sampled(worker), 0.05))
    assert metrics["training/rollout_logprobs_diff_max"].value == pytest.approx(0.05, abs=1e-4)


def test_the_bound_of_the_difference_follows_the_inverse_of_the_temperature(toy_dir):
    tenth = Rollout(sampling=Sampling(temperature=0.1))
    worker = actor(toy_dir(), rollout=tenth)
    assert worker.update(moved(sampled(worker), 0.009))["training/rollout_logprobs_diff_max"].value > 5e-3
    again = actor(toy_dir(), rollout=tenth)
    with pytest.raises(StaleWeightsError, match=r"more than 0\.01 .*divided by the temperature 0\.1"):
        again.update(moved(sampled(again), 0.02))
    warm = actor(toy_dir(), rollout=Rollout(sampling=Sampling(temperature=2.0)))
    with pytest.raises(StaleWeightsError, match=r"more than 0\.001\. Either"):
        warm.update(moved(sampled(warm), 0.002))


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


def test_a_colocated_rollout_is_told_whether_it_sleeps(toy_dir):
    model = Model(path=str(toy_dir()))
    rollout = RolloutSetup(Rollout(), model, max_prompt_tokens=8, max_response_tokens=4, seed=0)
    with pytest.raises(AssertionError, match="rollout.sleep has not been given"):
        ActorWorker(WorkerContext("actor"), setup=setup_of(toy_dir()), algorithm=Algorithm(), rollout=rollout)


def test_plain_sampling_gives_no_warning(toy_dir, caplog):
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        actor(toy_dir(), rollout=Rollout(eval_sampling=Sampling(top_p=0.5)))
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
    with pytest.raises(ConfigError, match="2 optimizer steps per batch") as caught:
        worker.update(batch.only([name for name in batch.columns if name != "old_logprobs"]))
    assert "actor.epochs=1" in caught.value.remedy


def test_one_step_does_not_need_old_logprobs(toy_dir):
    given, absent = actor(toy_dir()), actor(toy_dir())
    batch = sampled(given)
    given.update(batch)
    absent.update(batch.only([name for name in batch.columns if name != "old_logprobs"]))
    assert largest_difference(weights(given.engine), weights(absent.engine)) == 0.0


def test_without_old_logprobs_the_first_update_compares_its_own_pass_with_the_rollout(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    absent = batch.only([name for name in batch.columns if name != "old_logprobs"])
    with pytest.raises(StaleWeightsError, match="differs by 5.00e-01, more than 0.001") as caught:
        worker.update(moved(absent, 0.5))
    assert "rollout.engine=transformers" in caught.value.remedy


def test_the_rollouts_log_probabilities_as_old_ones_are_compared_in_the_first_optimizer_step(toy_dir):
    algorithm = Algorithm(advantage="grpo", old_logprobs=OldLogprobs.rollout)
    worker = actor(toy_dir(), algorithm=algorithm, minibatch_sequences=3, epochs=2)
    batch = sampled(worker)
    absent = batch.only([name for name in batch.columns if name != "old_logprobs"])
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
    with pytest.raises(ConfigError, match=r"learned since .* no old_logprobs") as caught:
        worker.update(batch.only([name for name in batch.columns if name != "old_logprobs"]))
    assert "Call actor.logprobs before" in caught.value.remedy
    assert worker.update(batch)["actor/ppo_kl"].value != 0.0


def test_a_column_that_a_users_loss_names_and_the_dataflow_lacks_is_told(toy_dir, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def tied(logprobs, ref_logprobs):\n    return (logprobs - ref_logprobs).square()\n")
    worker = actor(toy_dir(), algorithm=Algorithm(advantage="grpo", policy_loss=f"{file}:tied"))
    with pytest.raises(BatchError, match=r"policy_loss=.*own\.py:tied.*ref_logprobs"):
        worker.update(sampled(worker))


def test_kl_in_the_loss_without_a_reference_is_an_error_that_names_it(toy_dir):
    algorithm = Algorithm(advantage="grpo", kl=KL(placement=KLPlacement.loss))
    worker = actor(toy_dir(), algorithm=algorithm)
    with pytest.raises(BatchError, match=r"algorithm\.kl\.placement=loss.*ref_logprobs"):
        worker.update(sampled(worker))


def test_metrics_have_the_names_that_dashboards_know(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    batch = batch.join(worker.advantages(batch.with_columns(rows={"scores": torch.arange(6.0)})))
    metrics = worker.update(batch)
    expected = [f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "grad_norm", "lr")]
    expected += [f"critic/{name}/{part}" for name in ("rewards", "advantages") for part in ("mean", "max", "min")]
    assert set(expected) <= metrics.keys()


def test_rewards_are_reported_a_sequence(toy_dir):
    worker = actor(toy_dir())
    batch = sampled(worker)
    batch = batch.join(worker.advantages(batch.with_columns(rows={"scores": torch.arange(6.0)})))
    metrics = worker.update(batch)
    assert (metrics["critic/rewards/mean"].value, metrics["critic/rewards/max"].value) == (2.5, 5.0)


def test_evaluation_draws_with_its_own_settings(toy_dir):
    worker = actor(toy_dir(), rollout=Rollout(eval_sampling=Sampling(temperature=0.5)))
    assert [worker.generate(prompts(), purpose).meta["temperature"] for purpose in ("train", "eval")] == [1.0, 0.5]


def test_evaluation_draws_its_own_numbers_the_same_each_time(toy_dir):
    worker = actor(toy_dir())
    train, first, second = (
        worker.generate(prompts(), purpose).tokens("response_ids").padded(0, length=8)
        for purpose in ("train", "eval", "eval")
    )
    assert torch.equal(first, second)
    assert not torch.equal(train, first)


def test_greedy_samples_of_one_prompt_are_equal(toy_dir):
    rows = actor(toy_dir()).generate(prompts(), "greedy").tokens("response_ids").rows()
    assert all(torch.equal(rows[2 * i], rows[2 * i + 1]) for i in range(PROMPTS))
    assert len(rows) == PROMPTS * SAMPLES


def test_imitation_lowers_its_loss(toy_dir):
    worker = actor(toy_dir(), minibatch_sequences=5)
    losses = [worker.supervised_step(sequences())["train/loss"].value for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_restored_actor_must_publish_and_then_goes_on_the_same(toy_dir, tmp_path):
    algorithm = Algorithm(
        advantage="grpo", kl=KL(placement=KLPlacement.reward, coefficient=0.3, target=0.1, horizon=60)
    )
    first, second = actor(toy_dir(), algorithm=algorithm), actor(toy_dir(seed=1), algorithm=algorithm)
    batch = sampled(first)
    judged = batch.with_columns(
        rows={"scores": torch.arange(6.0)}, tokens={"ref_logprobs": numbers_like(batch.tokens("old_logprobs"), seed=5)}
    )
    first.update(judged.join(first.advantages(judged)))
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
    away = {Part.parameters, Part.optimizer}
    batch = sampled(worker)
    shell = worker.engine
    assert shell.away == away
    worker.update(batch)
    assert shell.away == away
    worker.publish_weights(1)
    assert shell.away == away
    worker.generate(prompts())
    assert shell.away == away
    worker.save(tmp_path)
    assert shell.away == away
    worker.load(tmp_path)
    assert shell.away == away


def test_squared_probabilities_come_beside_the_logprobs_where_the_estimator_reads_them(toy_dir):
    plain, asked = actor(toy_dir()), actor(toy_dir(), algorithm=Algorithm(advantage="optimal_token_baseline"))
    batch = sequences()
    found = asked.logprobs(batch)
    assert plain.logprobs(batch).columns == ["old_logprobs"]
    assert found.columns == ["old_logprobs", "sum_pi_squared"]
    squares, chosen = found.tokens("sum_pi_squared").values, found.tokens("old_logprobs").values.exp()
    # Among them is the square of the chosen token's probability; and they are of all 64 tokens at least 1 / 64.
    assert bool((squares >= chosen.square() - 1e-6).all())
    assert float(squares.min()) >= 1 / 64 - 1e-6
    assert torch.equal(found.tokens("old_logprobs").values, plain.logprobs(batch).tokens("old_logprobs").values)
