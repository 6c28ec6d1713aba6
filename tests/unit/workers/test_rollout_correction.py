"""What a batch loses before the policy learns from it, and what is said of that."""

import math
from dataclasses import replace

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, Correction, CorrectionLevel, OldLogprobs
from hybridflow.config.training import Optimizer
from hybridflow.errors import BatchError, ConfigError
from hybridflow.observability.metrics import merge, plain
from hybridflow.workers.rollout_correction import rollout_corrected
from tests.oracles import correction as oracle
from tests.oracles.reductions import kept
from tests.unit.algorithms.examples import itself
from tests.unit.algorithms.fake_ranks import on_ranks
from tests.unit.engines.training.engines import largest_difference, weights
from tests.unit.workers.roles import GRPO, actor, sampled

LEVEL = CorrectionLevel
LENGTHS = (4, 2, 1, 3, 5)


def made(seed: int = 0) -> Batch:
    """Rows of unequal lengths, one token of which is not the policy's; the second met its length limit."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> Ragged:
        drawn = scale * torch.randn(sum(LENGTHS), generator=generator)
        return Ragged.from_lengths(drawn, torch.tensor(LENGTHS))

    old = numbers(1.0)
    old = old.like(-old.values.abs())
    mask = torch.ones(sum(LENGTHS))
    mask[2] = 0.0
    return Batch.of(
        rows={"truncated": torch.tensor([False, True, False, False, False])},
        tokens={
            "response_mask": old.like(mask),
            "old_logprobs": old,
            "rollout_logprobs": old.like(old.values + numbers(0.2).values),
            "advantages": numbers(1.0),
        },
    )


def corrected(batch: Batch, correction: Correction, reduce=itself, old_logprobs=OldLogprobs.auto):
    return rollout_corrected(batch, Algorithm(correction=correction, old_logprobs=old_logprobs), reduce)


def rows_of(batch: Batch, name: str) -> list[list[float]]:
    """Of each row, the numbers of the tokens that counted at first."""
    mask = made().tokens("response_mask").padded(0)
    return kept(batch.tokens(name).padded(0).double().tolist(), mask.tolist())


def test_nothing_is_done_and_nothing_said_unless_asked():
    batch = made()
    found, metrics = rollout_corrected(batch, Algorithm(), itself)
    assert found is batch
    assert metrics == {}


def test_truncated_responses_are_left_out_on_request():
    found, metrics = rollout_corrected(made(), Algorithm(mask_truncated=True), itself)
    sums = found.tokens("response_mask").row_sums().tolist()
    assert sums == [3.0, 0.0, 1.0, 3.0, 5.0]
    assert plain(metrics) == {"actor/truncated_fraction": pytest.approx(0.2)}


def test_masking_what_is_truncated_needs_to_know_it():
    batch = made()
    batch = batch.only([name for name in batch.columns if name != "truncated"])
    with pytest.raises(BatchError, match=r"mask_truncated=true.*truncated"):
        rollout_corrected(batch, Algorithm(mask_truncated=True), itself)


@pytest.mark.parametrize("level", [LEVEL.token, LEVEL.sequence, LEVEL.geometric])
@pytest.mark.parametrize(("upper", "lower"), [(1.1, None), (1.4, 0.8)])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_the_oracles(level, upper, lower, normalize):
    batch = made()
    correction = Correction(weights=level, upper=upper, lower=lower, normalize=normalize)
    found, metrics = corrected(batch, correction)
    ratios = oracle.ratios(rows_of(batch, "old_logprobs"), rows_of(batch, "rollout_logprobs"), level.value)
    expected = oracle.weights(ratios, upper, lower)
    factor = oracle.mean_weight(expected, level.value) if normalize else 1.0
    for row, wanted in zip(rows_of(found, "correction_weights"), expected, strict=True):
        assert row == pytest.approx([weight / factor for weight in wanted], rel=1e-4)
    assert torch.equal(found.tokens("response_mask").values, batch.tokens("response_mask").values)
    assert metrics["rollout_corr/rollout_is_max"].value == pytest.approx(max(map(max, expected)), rel=1e-4)
    assert ("rollout_corr/rollout_is_batch_norm_factor" in metrics) == normalize
    assert ("rollout_corr/rollout_is_ratio_fraction_low" in metrics) == (lower is not None)
    assert ("rollout_corr/rollout_is_oob_ratio" in metrics) == (lower is not None)
    reported = plain(metrics)
    if lower is not None:
        outside = [not lower <= ratio <= upper for row in ratios for ratio in row]
        assert reported["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(sum(outside) / len(outside), abs=1e-6)
    for name, number in oracle.spread(expected, ratios, lower or 1 / upper, upper, 1.0).items():
        assert reported[f"rollout_corr/rollout_is_{name}"] == pytest.approx(number, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("level", "upper"), [(None, 2.0), (LEVEL.token, 1.25), (LEVEL.sequence, 1.4), (LEVEL.geometric, 1.15)]
)
@pytest.mark.parametrize("veto", [None, 0.75])
def test_what_is_rejected_is_the_oracles(level, upper, veto):
    batch = made()
    correction = Correction(reject=level or LEVEL.none, reject_upper=upper, veto=veto)
    found, metrics = corrected(batch, correction)
    old, rollout = rows_of(batch, "old_logprobs"), rows_of(batch, "rollout_logprobs")
    expected = oracle.kept(old, rollout, None if level is None else level.value, (1 / upper, upper), veto)
    assert [[bool(m) for m in row] for row in rows_of(found, "response_mask")] == expected
    if level is not None:
        kind = {LEVEL.token: "token_k1", LEVEL.sequence: "seq_sum_k1", LEVEL.geometric: "seq_mean_k1"}[level]
        statistics = [[-math.log(ratio) for ratio in row] for row in oracle.ratios(old, rollout, level.value)]
        reported = plain(metrics)
        for name, number in oracle.spread(statistics, statistics, -math.log(upper), math.log(upper), 0.0).items():
            assert reported[f"rollout_corr/rollout_rs_{kind}_{name}"] == pytest.approx(number, rel=1e-3, abs=1e-5), name
        units = [row if level is LEVEL.token else row[:1] for row in statistics]
        flat = [number for row in units for number in row]
        assert reported[f"rollout_corr/rollout_rs_{kind}_max"] == pytest.approx(max(flat), abs=1e-5)
        high = sum(number > math.log(upper) for number in flat) / len(flat)
        assert reported[f"rollout_corr/rollout_rs_{kind}_fraction_high"] == pytest.approx(high, abs=1e-6)
    if level is not None or veto is not None:
        flat = [flag for row in expected for flag in row]
        fraction = metrics["rollout_corr/rollout_rs_masked_fraction"].value
        assert fraction == pytest.approx(1 - sum(flat) / len(flat))
        touched = metrics["rollout_corr/rollout_rs_seq_masked_fraction"].value
        assert touched == pytest.approx(sum(not all(row) for row in expected) / len(expected))


def test_metrics_of_the_mismatch_are_the_oracles():
    batch = made()
    _, metrics = corrected(batch, Correction(weights=LEVEL.token))
    expected = oracle.mismatch(rows_of(batch, "old_logprobs"), rows_of(batch, "rollout_logprobs"))
    found = plain(metrics)
    for name, number in expected.items():
        assert found[f"rollout_corr/{name}"] == pytest.approx(number, rel=1e-4, abs=1e-6), name
    gap = (batch.tokens("old_logprobs").values - batch.tokens("rollout_logprobs").values).abs()
    gap = gap * batch.tokens("response_mask").values
    assert found["training/rollout_logprobs_diff_max"] == pytest.approx(float(gap.max()))


@pytest.mark.parametrize(
    "correction",
    [
        Correction(weights=LEVEL.token, upper=1.2, normalize=True, reject=LEVEL.token, reject_upper=1.5),
        Correction(weights=LEVEL.sequence, upper=1.5, lower=0.4, normalize=True, veto=0.5),
    ],
    ids=["token", "sequence"],
)
def test_ranks_correct_their_rows_as_one_would(correction):
    batch = made()
    whole, of_whole = corrected(batch, correction)

    def program(start, stop):
        return lambda reduce: corrected(batch.slice(start, stop), correction, reduce)

    parts = on_ranks([program(0, 1), program(1, 5)])
    for name in ("correction_weights", "response_mask"):
        together = torch.cat([part.tokens(name).values for part, _ in parts])
        torch.testing.assert_close(together, whole.tokens(name).values)
    merged = plain(merge([metrics for _, metrics in parts]))
    assert merged == pytest.approx(plain(of_whole), rel=1e-4, abs=1e-6)


def test_the_rollouts_can_be_the_old_ones_and_the_true_ones_are_compared_with_them():
    batch = made()
    found, metrics = corrected(batch, Correction(), old_logprobs=OldLogprobs.rollout)
    assert torch.equal(found.tokens("old_logprobs").values, batch.tokens("rollout_logprobs").values)
    assert metrics["training/rollout_logprobs_diff_max"].value > 0.1
    assert metrics["rollout_corr/k3_kl"].value > 0.01
    assert "correction_weights" not in found
    found, _ = corrected(batch, Correction(reject=LEVEL.token, reject_upper=1.2), old_logprobs=OldLogprobs.rollout)
    assert 0 < float(found.tokens("response_mask").values.sum()) < float(batch.tokens("response_mask").values.sum())


def test_the_rollouts_alone_need_no_others():
    batch = made()
    given = batch.only([name for name in batch.columns if name != "old_logprobs"])
    found, metrics = corrected(given, Correction(), old_logprobs=OldLogprobs.rollout)
    assert torch.equal(found.tokens("old_logprobs").values, batch.tokens("rollout_logprobs").values)
    assert metrics == {}


def test_an_interpolation_leaves_old_logprobs_and_weights_to_the_loss():
    batch = made()
    found, metrics = corrected(batch, Correction(weights=LEVEL.token), old_logprobs=OldLogprobs.interpolate)
    assert set(batch.columns) - set(found.columns) == {"old_logprobs"} and not metrics
    with pytest.raises(BatchError, match=r"old_logprobs=interpolate.*rollout_logprobs"):
        given = batch.only([name for name in batch.columns if name != "rollout_logprobs"])
        corrected(given, Correction(weights=LEVEL.token), old_logprobs=OldLogprobs.interpolate)


@pytest.mark.parametrize("old", [OldLogprobs.auto, OldLogprobs.recompute, OldLogprobs.rollout])
@pytest.mark.parametrize("settings", [{"weights": LEVEL.token}, {"veto": 0.1}], ids=str)
def test_what_compares_needs_old_logprobs_and_says_so(settings, old):
    batch = made()
    with pytest.raises(ConfigError, match=r"no old_logprobs.*Call actor\.logprobs"):
        corrected(
            batch.only([n for n in batch.columns if n != "old_logprobs"]), Correction(**settings), old_logprobs=old
        )


def test_a_batch_of_which_everything_is_rejected_is_an_error():
    batch = made()
    rollout = batch.tokens("rollout_logprobs")
    far = batch.with_columns(tokens={"rollout_logprobs": rollout.like(rollout.values - 9.0)})
    with pytest.raises(ConfigError, match=r"rejects all 14 tokens.*algorithm\.correction\.reject_upper"):
        corrected(far, Correction(reject=LEVEL.token))


def test_one_rank_may_lose_all_that_it_has():
    batch = made()
    rollout = batch.tokens("rollout_logprobs")
    values = batch.tokens("old_logprobs").values.clone()
    values[: LENGTHS[0]] -= 9.0
    batch = batch.with_columns(tokens={"rollout_logprobs": rollout.like(values)})
    parts = on_ranks(
        [
            lambda reduce: corrected(batch.slice(0, 1), Correction(reject=LEVEL.token), reduce),
            lambda reduce: corrected(batch.slice(1, 5), Correction(reject=LEVEL.token), reduce),
        ]
    )
    assert [float(part.tokens("response_mask").values.sum()) for part, _ in parts] == [0.0, 11.0]


def test_weights_scale_the_gradient_of_an_update(toy_dir):
    """With a constant mismatch every weight is the same number, and plain SGD would move by so much less."""
    still = Optimizer(learning_rate=0.0, max_grad_norm=0.0)
    norms = []
    for correction in (Correction(), Correction(weights=LEVEL.token)):
        worker = actor(toy_dir(), algorithm=replace(GRPO, correction=correction), optimizer=still)
        batch = sampled(worker)
        rollout = batch.tokens("rollout_logprobs")
        worker._policy._has_compared = True
        metrics = worker.update(batch.with_columns(tokens={"rollout_logprobs": rollout.like(rollout.values + 0.7)}))
        norms.append(metrics["actor/grad_norm"].value)
    assert norms[1] / norms[0] == pytest.approx(0.49659, rel=1e-3)


def test_several_steps_without_old_logprobs_are_right_with_the_rollouts(toy_dir):
    algorithm = replace(GRPO, old_logprobs=OldLogprobs.rollout)
    given, absent = (actor(toy_dir(), algorithm=algorithm, minibatch_sequences=3, epochs=2) for _ in range(2))
    batch = sampled(given)
    rollout = batch.tokens("rollout_logprobs")
    shifted = rollout.values + 1e-4 * (torch.arange(len(rollout.values)) % 2)  # every other token
    batch = batch.with_columns(tokens={"rollout_logprobs": rollout.like(shifted)})
    reported = given.update(batch)
    quiet = absent.update(batch.only([name for name in batch.columns if name != "old_logprobs"]))
    assert largest_difference(weights(given.engine), weights(absent.engine)) == 0.0
    assert reported["training/rollout_logprobs_diff_max"].value == pytest.approx(1e-4, abs=2e-5)
    assert quiet["training/rollout_logprobs_diff_max"].value == pytest.approx(1e-4, abs=2e-5)
