"""Losses with global denominators: whatever the split into microbatches, the parts add up to the whole."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.catalogue import POLICY_LOSSES
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import KL, Algorithm, Correction, CorrectionLevel, KLPlacement, OldLogprobs
from hybridflow.config.choices import AGGREGATIONS
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.errors import BatchError
from hybridflow.observability.metrics import merge, plain
from hybridflow.workers.named_functions import policy_loss
from hybridflow.workers.objectives import (
    STALENESS,
    Denominators,
    policy_objective,
    prepared,
    rollout_difference,
    supervised_objective,
    value_objective,
)
from tests.oracles import correction as correction_oracle
from tests.oracles import objectives as oracle
from tests.unit.algorithms.examples import itself
from tests.unit.algorithms.fake_ranks import on_ranks

ROWS, WIDTH = 6, 5
NORM = 7.0
POLICIES = {
    "plain": (Algorithm(clip_low=0.2, clip_high=0.3), {}),
    "dual clip": (Algorithm(clip_low=0.2, clip_high=0.3, dual_clip=1.5), {"dual_clip": 1.5}),
    "entropy bonus": (Algorithm(clip_low=0.2, clip_high=0.3, entropy_coefficient=0.1), {"entropy": 0.1}),
    "KL in the loss": (
        Algorithm(
            clip_low=0.2, clip_high=0.3, kl=KL(placement=KLPlacement.loss, coefficient=0.5, estimator="low_var_kl")
        ),
        {"kl": 0.5, "estimator": "k3"},
    ),
    "KL in the reward": (
        Algorithm(clip_low=0.2, clip_high=0.3, kl=KL(placement=KLPlacement.reward, coefficient=0.5)),
        {},
    ),
}


def made(seed: int = 0) -> dict[str, Tensor]:
    """Columns [B, R] as an engine gives them: ratios on both sides of the bounds, holes in the mask, an empty row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator)

    logprobs = -normal(1.0).abs()
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.7).float()
    mask[2] = 0.0
    return {
        "response_mask": mask,
        "logprobs": logprobs,
        "entropy": normal(1.0).abs(),
        "old_logprobs": logprobs + normal(0.3),
        "ref_logprobs": logprobs + normal(0.5),
        "rollout_logprobs": logprobs + normal(0.01),
        "advantages": normal(1.0),
        "values": normal(1.0),
        "new_values": normal(1.0),
        "returns": normal(1.0),
    }


def denominators(columns: dict[str, Tensor]) -> Denominators:
    mask = Ragged.from_rows(list(columns["response_mask"]), torch.float32)
    return Denominators.of(Batch.of(tokens={"response_mask": mask}))


def outputs_of(columns: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: columns["new_values" if name == "values" else name] for name in names}


def whole(loss_fn: LossFn, columns: dict[str, Tensor]) -> Loss:
    return loss_fn(outputs_of(columns, loss_fn.outputs), columns)


def in_parts(loss_fn: LossFn, columns: dict[str, Tensor], split: list[int]) -> list[Loss]:
    parts = zip(*(column.split(split) for column in columns.values()), strict=True)
    return [whole(loss_fn, dict(zip(columns, part, strict=True))) for part in parts]


def lists(columns: dict[str, Tensor], **names: str) -> dict[str, list]:
    return {name: columns[column].double().tolist() for name, column in names.items()}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", POLICIES)
def test_parts_of_the_policys_loss_add_up_to_the_oracles(mode, kind):
    algorithm, settings = POLICIES[kind]
    algorithm = replace(algorithm, aggregation=mode)
    columns = made()
    parts = in_parts(policy_objective(algorithm, denominators(columns), norm_tokens=NORM), columns, [1, 3, 2])
    found = sum(float(part.value) for part in parts)
    names = {"mask": "response_mask", "logprobs": "logprobs", "old": "old_logprobs", "ref": "ref_logprobs"}
    expected = oracle.policy_loss(
        lists(columns, **names, advantages="advantages", entropy="entropy"),
        {"clip_low": 0.2, "clip_high": 0.3, **settings},
        mode,
        NORM,
    )
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_loss_is_the_oracles(clip):
    columns = made()
    found = whole(value_objective(Algorithm(value_clip=clip), denominators(columns)), columns)
    expected = oracle.value_loss(
        lists(columns, mask="response_mask", values="new_values", old="values", returns="returns"), clip
    )
    assert float(found.value) == pytest.approx(expected, rel=1e-5)
    assert ("critic/vf_clipfrac" in found.metrics) == (clip is not None)


def test_the_loss_of_imitation_is_the_mean_negative_log_likelihood():
    columns = made()
    found = whole(supervised_objective(denominators(columns)), columns)
    kept = columns["logprobs"][columns["response_mask"].bool()]
    assert float(found.value) == pytest.approx(-float(kept.mean()), rel=1e-5)
    assert found.metrics["train/loss"].value == pytest.approx(float(found.value))


def batch_of(columns: dict[str, Tensor]) -> Batch:
    """The columns as a batch with token ids."""
    ids = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) + 2
    padded = {name: column.detach() for name, column in columns.items()} | {"prompt_ids": ids, "response_ids": ids}
    return Batch.of(tokens={n: Ragged.from_padded(c, torch.full((ROWS,), WIDTH)) for n, c in padded.items()})


def with_prepared(algorithm: Algorithm, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns with those that the loss computes from the whole minibatch."""
    found = prepared(policy_loss(algorithm), batch_of(columns), itself)
    added = {n: c.padded(0) for n, c in found.token_columns.items() if n.startswith("prepared/")}
    return columns | added


def of_every_loss(name: str, **settings: object) -> Algorithm:
    """An algorithm with a loss of the table, and settings under which it does what is its own to toy columns."""
    selections = {"clip_cov": {"fraction": 0.2, "covariance_low": 0.1}, "kl_cov": {"fraction": 0.2}}
    return Algorithm(policy_loss=name, loss_settings=selections.get(name, {}), **settings)


def summed_loss(algorithm: Algorithm, split: list[int], columns: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The loss of the parts and its gradient."""
    columns = with_prepared(algorithm, columns)
    columns["logprobs"] = columns["logprobs"].clone().requires_grad_()
    losses = in_parts(policy_objective(algorithm, denominators(columns), norm_tokens=NORM), columns, split)
    total = torch.stack([loss.value for loss in losses]).sum()
    return float(total.detach()), torch.autograd.grad(total, columns["logprobs"])[0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_parts_of_every_loss_and_their_metrics_add_up_to_the_whole(name):
    split = [1, 2, 1, 2]
    penalty = KL(placement=KLPlacement.loss, coefficient=0.5, estimator="k3+")
    algorithm = of_every_loss(name, entropy_coefficient=0.1, kl=penalty)
    columns = made() | {"correction_weights": made(9)["returns"].abs()}
    value, slope = summed_loss(algorithm, split, columns)
    expected, expected_slope = summed_loss(algorithm, [ROWS], columns)
    assert value == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(slope, expected_slope, atol=1e-7)
    assert float(slope.abs().max()) > 0
    columns = with_prepared(algorithm, columns)
    loss_fn = policy_objective(algorithm, denominators(columns), norm_tokens=NORM)
    merged = plain(merge(part.metrics for part in in_parts(loss_fn, columns, split)))
    assert merged == pytest.approx(plain(whole(loss_fn, columns).metrics), rel=1e-4, abs=1e-7)
    assert set(POLICY_LOSSES[name].watches) <= merged.keys()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_constant_weight_scales_every_loss(name):
    algorithm = of_every_loss(name)
    half = {"correction_weights": torch.full((ROWS, WIDTH), 0.5)}
    value, slope = summed_loss(algorithm, [ROWS], made())
    found, found_slope = summed_loss(algorithm, [ROWS], made() | half)
    assert found == pytest.approx(0.5 * value, rel=1e-5)
    assert torch.allclose(found_slope, 0.5 * slope, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, method in POLICY_LOSSES.items() if method.prepare is not None])
def test_what_is_prepared_from_old_logprobs_asks_for_them(name):
    absent = {n: column for n, column in made().items() if n != "old_logprobs"}
    with pytest.raises(BatchError, match=rf"algorithm.policy_loss={name}.*old_logprobs"):
        with_prepared(of_every_loss(name), absent)


@pytest.mark.parametrize("name", [name for name, method in POLICY_LOSSES.items() if method.prepare is not None])
def test_what_is_prepared_does_not_depend_on_the_ranks(name):
    loss, batch = policy_loss(of_every_loss(name)), batch_of(made())

    def program(start: int, stop: int):
        return lambda reduce: prepared(loss, batch.slice(start, stop), reduce)

    parts = on_ranks([program(0, 1), program(1, 3), program(3, ROWS)])
    found = torch.cat([part.tokens("prepared/is_selected").values for part in parts])
    whole_batch = prepared(loss, batch, itself).tokens("prepared/is_selected").values
    assert torch.equal(found, whole_batch)
    assert 0 < int(found.sum()) < len(found)


def test_the_rollout_is_watched_where_it_is_asked():
    columns, sizes = made(), denominators(made())
    gaps = []
    columns[STALENESS] = torch.full((ROWS, WIDTH), 2.0)
    for old in OldLogprobs:
        algorithm = Algorithm(old_logprobs=old, correction=Correction(weights=CorrectionLevel.token))
        quiet = policy_objective(algorithm, sizes, norm_tokens=NORM, compares_rollout=False)
        assert not [name for name in whole(quiet, columns).metrics if name.startswith("training/rollout")]
        found_metrics = whole(policy_objective(algorithm, sizes, norm_tokens=NORM), columns).metrics
        gaps.append(found_metrics["training/rollout_logprobs_diff_max"].value)
    kept = columns["response_mask"].bool()
    of_old, of_now = (
        float((columns[name] - columns["rollout_logprobs"])[kept].abs().max()) for name in ("old_logprobs", "logprobs")
    )
    assert gaps == pytest.approx([of_old, of_old, of_now, of_now])


def test_metrics_of_parts_merge_to_those_of_the_whole():
    columns = made()
    sizes = denominators(columns)
    for loss_fn in (value_objective(Algorithm(), sizes), supervised_objective(sizes)):
        merged = plain(merge(part.metrics for part in in_parts(loss_fn, columns, [1, 2, 1, 2])))
        assert merged == pytest.approx(plain(whole(loss_fn, columns).metrics), rel=1e-4, abs=1e-7)


def test_without_old_logprobs_the_models_own_are_taken():
    columns = made()
    own = columns | {"old_logprobs": columns["logprobs"].clone()}
    absent = {name: column for name, column in columns.items() if name != "old_logprobs"}
    slopes = []
    for given in (own, absent):
        given["logprobs"] = columns["logprobs"].clone().requires_grad_()
        loss = whole(policy_objective(Algorithm(), denominators(columns), norm_tokens=NORM), given)
        slopes.append(torch.autograd.grad(loss.value, given["logprobs"])[0])
        assert loss.metrics["actor/ppo_kl"].value == 0.0
        assert loss.metrics["actor/pg_clipfrac"].value == 0.0
    assert torch.equal(slopes[0], slopes[1])


def test_metrics_have_the_names_that_dashboards_know():
    columns = made()
    algorithm = POLICIES["KL in the loss"][0]
    found = whole(policy_objective(algorithm, denominators(columns), norm_tokens=NORM), columns).metrics
    expected = {"pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "kl_loss", "kl_coef"}
    assert {f"actor/{name}" for name in expected} <= found.keys()
    assert {"training/rollout_probs_diff_max", "training/rollout_probs_diff_mean"} <= found.keys()
    value = whole(value_objective(Algorithm(), denominators(columns)), columns).metrics
    assert value.keys() == {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    kept = columns["new_values"][columns["response_mask"].bool()]
    assert value["critic/vpred_mean"].value == pytest.approx(float(kept.mean()), abs=1e-6)
    assert found["actor/kl_coef"].value == algorithm.kl.coefficient


def test_the_default_divergence_in_the_loss_has_an_unbiased_gradient():
    assert [KL(placement=place).estimator_in_use for place in (KLPlacement.loss, KLPlacement.reward)] == ["k3+", "k1"]


def test_the_policys_own_loss_is_reported_without_bonus_and_penalty():
    columns = made()
    plain_loss = whole(policy_objective(Algorithm(), denominators(columns), norm_tokens=NORM), columns)
    algorithm = Algorithm(entropy_coefficient=0.1, kl=KL(placement=KLPlacement.loss, coefficient=0.5))
    found = whole(policy_objective(algorithm, denominators(columns), norm_tokens=NORM), columns)
    assert found.metrics["actor/pg_loss"].value == pytest.approx(float(plain_loss.value), rel=1e-6)
    assert float(found.value) != pytest.approx(float(plain_loss.value), rel=1e-3)


def test_the_difference_from_the_rollout_is_that_of_probabilities_where_the_mask_is_one():
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    old = torch.tensor([[0.5, 0.2, 0.9]]).log()
    rollout = torch.tensor([[0.4, 0.25, 0.1]]).log()
    found = plain(rollout_difference(rollout, old, mask))
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.075)
    assert found["training/rollout_logprobs_diff_max"] == pytest.approx(0.22314, rel=1e-4)


def test_denominators_count_tokens_and_all_sequences():
    columns = made()
    found = denominators(columns)
    assert not columns["response_mask"][2].any()
    assert found == Denominators(float(columns["response_mask"].sum()), float(ROWS))
    batch = Batch.of(tokens={"response_mask": Ragged.from_rows(list(columns["response_mask"]), torch.float32)})
    programs = [lambda reduce, part=part: Denominators.of(part, reduce) for part in batch.split([1, 2, 3])]
    assert on_ranks(programs) == [found] * 3


@pytest.mark.parametrize("level", [CorrectionLevel.token, CorrectionLevel.sequence, CorrectionLevel.geometric])
def test_interpolated_old_logprobs_give_the_loss_and_the_gradient_of_decoupled_ppo(level):
    """The same as with the proximal policy and the weights of the oracles as columns."""
    columns = made()
    columns["rollout_logprobs"] = columns["logprobs"] + 5 * (columns["rollout_logprobs"] - columns["logprobs"])
    columns[STALENESS] = torch.arange(WIDTH).remainder(4).float().expand(ROWS, WIDTH)
    correction = Correction(weights=level, upper=1.05)
    algorithm = Algorithm(old_logprobs=OldLogprobs.interpolate, correction=correction)
    mask = columns["response_mask"].bool()

    def rows(name: str) -> list[list[float]]:
        return [row[kept].tolist() for row, kept in zip(columns[name].double(), mask, strict=True)]

    def filled(values: list[list[float]]) -> Tensor:
        full = torch.zeros(ROWS, WIDTH)
        full[mask] = torch.tensor([number for row in values for number in row])
        return full

    ages = [[int(age) for age in row] for row in rows(STALENESS)]
    proximal = correction_oracle.interpolated(rows("logprobs"), rows("rollout_logprobs"), ages)
    ratios = correction_oracle.ratios(proximal, rows("rollout_logprobs"), level.value)
    given = {
        **{name: column for name, column in columns.items() if name != STALENESS},
        "old_logprobs": filled(proximal),
        "correction_weights": filled(correction_oracle.weights(ratios, correction.upper, None)),
    }
    expected = policy_objective(Algorithm(correction=correction), denominators(columns), norm_tokens=NORM)
    found = policy_objective(algorithm, denominators(columns), norm_tokens=NORM)
    losses, gradients = [], []
    for loss_fn, offered in ((found, columns), (expected, given)):
        logprobs = columns["logprobs"].clone().requires_grad_()
        loss = whole(loss_fn, {**offered, "logprobs": logprobs})
        loss.value.backward()
        losses.append(float(loss.value.detach()))
        gradients.append(logprobs.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)  # of numbers around 0.05, in float32
    assert gradients[0].abs().max() > 1e-3
    parts = in_parts(found, columns, [1, 3, 2])
    assert sum(float(part.value) for part in parts) == pytest.approx(losses[0], rel=1e-5)
