"""Our functions and those of verl 0.9.1 and TRL 1.16 on the same batches.

The peers wrote their answers themselves (`make peers`: benchmarks/peers/{verl,trl}_functions.py). Where ours differ by
choice, the case says so here, and docs/equations.md says why.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, load
from hybridflow.algorithms.correction import importance_ratio, importance_weights, mean_weight
from hybridflow.algorithms.kl import K3_BOUND, kl_divergence
from hybridflow.algorithms.losses.value import clipped_value_loss
from hybridflow.algorithms.masked import masked_whiten
from hybridflow.algorithms.shaping import token_rewards
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.choices import AGGREGATIONS
from hybridflow.workers.named_functions import called, estimator, policy_loss
from tests.parity.peer_files import BATCHES, FILES, Columns, assert_agrees

ESTIMATOR_SETTINGS = {
    "gae": Algorithm(gamma=0.9, lam=0.8),
    "reinforce_plus_plus": Algorithm(advantage="reinforce_plus_plus", gamma=0.9),
    "gdpo": Algorithm(advantage="gdpo", advantage_settings={"weights": [1.0, 0.5]}),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_verls(name, batch):
    algorithm = ESTIMATOR_SETTINGS.get(name, Algorithm(advantage=name))
    method = estimator(algorithm)

    def ours(columns: Columns) -> Tensor:
        rewards = token_rewards(columns["scores"], columns["mask"])
        numbers = {
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "reduce": lambda tensor: tensor,
            "draws": torch.zeros_like(columns["mask"]),
        }
        answer = method({**columns, **numbers, "rewards": rewards, "scores": rewards.sum(1)})
        advantages = answer[0] if isinstance(answer, tuple) else answer
        if (name, batch) == ("gpg", "binary"):
            # Both scale by rows / rows that teach: ours those of groups with spread, verl's those with a score.
            advantages = advantages * (8 / 12) * (12 / float(columns["scores"].count_nonzero()))
        return masked_whiten(advantages, columns["mask"]) if method.method.whitens else advantages

    assert_agrees("verl", f"advantage/{name}", batch, ours)


LOSS_SETTINGS = {
    "gspo": Algorithm(policy_loss="gspo", clip_low=0.1, clip_high=0.15),
    "cispo": Algorithm(policy_loss="cispo", clip_low=0.1, clip_high=0.3),
    "gmpo": Algorithm(policy_loss="gmpo", clip_low=0.3, clip_high=0.4),
    "clip_cov": Algorithm(
        policy_loss="clip_cov", loss_settings={"fraction": 1.0, "covariance_low": 0.2, "covariance_high": 5.0}
    ),
    "kl_cov": Algorithm(policy_loss="kl_cov", loss_settings={"fraction": 0.2, "kl_coefficient": 1.0}),
    "dppo_tv": Algorithm(policy_loss="dppo_tv", clip_low=0.1, clip_high=0.15, loss_settings={"max_ratio": 3.0}),
    "dppo_kl": Algorithm(policy_loss="dppo_kl", clip_low=0.05, clip_high=0.06, loss_settings={"max_ratio": 3.0}),
    "dro": Algorithm(policy_loss="dro", loss_settings={"beta": 0.3}),
}


def aggregated(algorithm: Algorithm) -> Callable[[Columns], Tensor]:
    """The policy's loss of a whole batch, as the objective makes it."""
    loss = policy_loss(algorithm)
    numbers = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high, "dual_clip": algorithm.dual_clip}

    def ours(columns: Columns) -> Tensor:
        offered = {**columns, **numbers, "entropy": torch.zeros_like(columns["mask"])}
        if loss.method.prepare is not None:
            # Ours choose tokens by the policy before the update, verl's by the policy as it is in the microbatch.
            now = {
                **offered,
                "old_logprobs": columns["logprobs"].detach(),
                "reduce": lambda tensor: tensor,
                "draws": torch.zeros_like(columns["mask"]),
            }
            offered |= called(load(loss.method.prepare), {**now, **loss.settings})
        values = loss(offered)
        assert isinstance(values, Tensor)
        return total(values, columns["mask"], algorithm.aggregation or loss.method.aggregation)

    return ours


def total(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The aggregate of a batch that is the whole of it."""
    tokens, sequences = float(mask.sum()), len(mask)
    return aggregate(values, mask, mode=mode, num_tokens=tokens, num_sequences=sequences, norm_tokens=mask.shape[1])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "ppo"])
def test_policy_losses_are_verls(name, batch):
    algorithm = LOSS_SETTINGS.get(name, Algorithm(policy_loss=name))
    assert_agrees("verl", f"loss/{name}", batch, aggregated(algorithm))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_clipped_surrogate_is_verls_in_every_aggregation(mode, batch):
    assert_agrees("verl", f"loss/ppo/{mode}", batch, aggregated(Algorithm(clip_high=0.28, aggregation=mode)))


@pytest.mark.parametrize("batch", BATCHES)
def test_the_dual_clip_is_verls(batch):
    assert_agrees("verl", "loss/ppo/dual_clip", batch, aggregated(Algorithm(dual_clip=1.5)))


@pytest.mark.parametrize("batch", BATCHES)
def test_the_critics_loss_is_verls(batch):
    def ours(columns: Columns) -> Tensor:
        returns = columns["values"] + columns["advantages"]
        loss = clipped_value_loss(columns["logprobs"], columns["values"], returns, clip=0.2)
        return total(loss, columns["mask"], "token-mean")

    assert_agrees("verl", "loss/value", batch, ours)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_divergences_are_verls(kind, batch):
    assert_agrees(
        "verl", f"kl/{kind}", batch, lambda c: kl_divergence(c["logprobs"], c["ref_logprobs"], estimator=kind)
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", ["token", "sequence", "token/normalized"])
def test_weights_against_a_mismatch_are_verls(case, batch):
    level = case.partition("/")[0]

    def ours(columns: Columns) -> Tensor:
        mask = columns["mask"]
        ratio = importance_ratio(columns["old_logprobs"], columns["rollout_logprobs"], mask, level=level)
        weights = importance_weights(ratio, upper=1.05)
        if case.endswith("normalized"):
            weights = weights / mean_weight(weights, mask, level=level, reduce=lambda tensor: tensor)
        return weights

    assert_agrees("verl", f"correction/{case}", batch, ours)


TRL_LOSSES = {
    "loss/grpo": Algorithm(clip_low=0.1, clip_high=0.15, aggregation="seq-mean-token-mean"),
    "loss/dapo": Algorithm(clip_low=0.1, clip_high=0.15),
    "loss/dr_grpo": Algorithm(clip_low=0.1, clip_high=0.15, aggregation="seq-mean-token-sum-norm"),
    "loss/gspo": Algorithm(policy_loss="gspo", clip_low=0.1, clip_high=0.15),
    "loss/cispo": Algorithm(policy_loss="cispo", clip_low=1.0, clip_high=0.15),
    "loss/sapo": Algorithm(policy_loss="sapo"),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("function", TRL_LOSSES)
def test_policy_losses_are_trls(function, batch):
    ours = aggregated(TRL_LOSSES[function])

    def with_one_advantage_a_sequence(columns: Columns) -> Tensor:
        whole = columns["advantages"][:, :1].expand(columns["mask"].shape)
        return ours({**columns, "advantages": whole})

    assert_agrees("trl", function, batch, with_one_advantage_a_sequence)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_divergence_in_the_loss_is_trls(batch):
    algorithm = Algorithm(clip_low=0.1, clip_high=0.15, aggregation="seq-mean-token-mean")
    surrogate = aggregated(algorithm)

    def with_divergence(columns: Columns) -> Tensor:
        mask = columns["mask"]
        whole = columns["advantages"][:, :1].expand(mask.shape)
        gap = columns["ref_logprobs"] - columns["logprobs"]
        unbounded = torch.expm1(gap) - gap
        bounded = kl_divergence(columns["logprobs"], columns["ref_logprobs"], estimator="k3")
        divergence = torch.where(unbounded > K3_BOUND, unbounded, bounded)  # TRL bounds nothing
        assert algorithm.aggregation is not None
        return surrogate({**columns, "advantages": whole}) + 0.3 * total(divergence, mask, algorithm.aggregation)

    assert_agrees("trl", "loss/grpo+kl", batch, with_divergence)


def test_the_peers_are_those_we_name():
    assert FILES["verl"]["verl"] == "0.9.1"
    assert FILES["trl"]["trl"] == "1.16.0"
