"""The results of verl 0.9.1's functions on seeded batches; run by that environment's Python.

    .peers/verl/bin/python benchmarks/peers/verl_functions.py tests/parity/peers/verl.json

The file holds the batches as well, so that the comparison needs neither verl nor the same random numbers.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import verl
from random_batches import Rounded, batches, rounded
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Batch = dict[str, Tensor]
Call = Callable[[Batch], Tensor | tuple[Tensor, Tensor]]


def main() -> None:
    """Writes all results to the file that the command line names."""
    results: dict[str, dict] = {"verl": verl.__version__, "batches": {}, "results": {}}
    for name, batch in batches().items():
        results["batches"][name] = {column: rounded(values) for column, values in batch.items()}
        for function, call in {**advantages(), **losses(), **further()}.items():
            results["results"].setdefault(function, {})[name] = answer(call, batch)
    Path(sys.argv[1]).write_text(json.dumps(results, separators=(",", ":")) + "\n")


def answer(call: Call, batch: Batch) -> dict[str, Rounded]:
    """A function's answer on a copy of the batch, and the gradient to `logprobs` where there is one."""
    copied = {name: values.clone() for name, values in batch.items()}
    copied["logprobs"].requires_grad_()
    torch.manual_seed(0)
    found = call(copied)
    value = found[0] if isinstance(found, tuple) else found
    rounded_results: dict[str, Rounded] = {"value": rounded(value.detach())}
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), copied["logprobs"])
        rounded_results["gradient"] = rounded(gradient)
    return rounded_results


def advantages() -> dict[str, Call]:
    """Estimators, under our names. Scores stand on the last token."""

    def outcome(function: Callable, **numbers: object) -> Call:
        def call(batch: Batch) -> tuple[Tensor, Tensor]:
            return function(
                token_level_rewards=token_rewards(batch), response_mask=batch["mask"], index=groups(batch), **numbers
            )

        return call

    def gae(batch: Batch) -> tuple[Tensor, Tensor]:
        return core_algos.compute_gae_advantage_return(
            token_level_rewards=token_rewards(batch),
            values=batch["values"],
            response_mask=batch["mask"],
            gamma=0.9,
            lam=0.8,
        )

    def remax(batch: Batch) -> tuple[Tensor, Tensor]:
        return core_algos.compute_remax_outcome_advantage(token_rewards(batch), batch["baselines"], batch["mask"])

    def token_baseline(batch: Batch) -> tuple[Tensor, Tensor]:
        return core_algos.compute_optimal_token_baseline_advantage(
            token_rewards(batch), batch["mask"], groups(batch), batch["old_logprobs"], batch["sum_pi_squared"]
        )

    def gdpo(batch: Batch) -> tuple[Tensor, Tensor]:
        keys = [f"reward_{i}" for i in range(batch["components"].shape[1])]
        return core_algos.compute_gdpo_outcome_advantage(
            token_rewards(batch),
            batch["mask"],
            groups(batch),
            config={"gdpo_reward_keys": keys, "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch={key: batch["components"][:, i].numpy() for i, key in enumerate(keys)},
            batch={
                "prompts": torch.zeros(len(batch["mask"]), 1),
                "attention_mask": torch.cat([torch.ones(len(batch["mask"]), 1), batch["mask"]], 1).long(),
            },
        )

    return {
        "advantage/gae": gae,
        "advantage/grpo": outcome(core_algos.compute_grpo_outcome_advantage),
        "advantage/dr_grpo": outcome(core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        "advantage/rloo": outcome(core_algos.compute_rloo_outcome_advantage),
        "advantage/remax": remax,
        "advantage/reinforce_plus_plus": lambda batch: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            token_rewards(batch), batch["mask"], config=AlgoConfig(gamma=0.9)
        ),
        "advantage/reinforce_plus_plus_baseline": outcome(
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
        ),
        "advantage/opo": outcome(core_algos.compute_opo_outcome_advantage),
        "advantage/gpg": outcome(core_algos.compute_gpg_outcome_advantage),
        "advantage/grpo_passk": outcome(core_algos.compute_grpo_passk_outcome_advantage, config=AlgoConfig()),
        "advantage/gdpo": gdpo,
        "advantage/optimal_token_baseline": token_baseline,
    }


def losses() -> dict[str, Call]:
    """Policy losses, under our names, each aggregated by the mode that verl or the paper gives it."""

    def loss(function: Callable, mode: str = "token-mean", **numbers: object) -> Call:
        inner = {name: numbers.pop(name) for name in list(numbers) if name in vars(actor().policy_loss)}

        def call(batch: Batch) -> Tensor:
            config = actor(**numbers)
            for name, value in inner.items():
                object.__setattr__(config.policy_loss, name, value)
            return function(
                old_log_prob=batch["old_logprobs"],
                log_prob=batch["logprobs"],
                advantages=batch["advantages"],
                response_mask=batch["mask"],
                loss_agg_mode=mode,
                config=config,
            )[0]

        return call

    vanilla = core_algos.compute_policy_loss_vanilla
    far = 1e9  # verl always has a second clip: this one never acts
    plain = {f"loss/ppo/{mode}": loss(vanilla, mode, clip_ratio_c=far, clip_ratio_high=0.28) for mode in MODES}
    return plain | {
        "loss/ppo/dual_clip": loss(vanilla, clip_ratio_c=1.5),
        "loss/gspo": loss(
            core_algos.compute_policy_loss_gspo, "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.15
        ),
        "loss/cispo": loss(core_algos.compute_policy_loss_cispo, clip_ratio_low=0.1, clip_ratio_high=0.3),
        "loss/sapo": loss(core_algos.compute_policy_loss_sapo, "seq-mean-token-mean"),
        "loss/gpg": loss(core_algos.compute_policy_loss_gpg),
        "loss/gmpo": loss(core_algos.compute_policy_loss_geo_mean, clip_ratio_low=0.3, clip_ratio_high=0.4),
        # All tokens within the bounds are taken, so that the random choice among them changes nothing.
        "loss/clip_cov": loss(
            core_algos.compute_policy_loss_clip_cov, clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=5.0
        ),
        "loss/kl_cov": loss(core_algos.compute_policy_loss_kl_cov, kl_cov_ratio=0.2, ppo_kl_coef=1.0),
        "loss/dppo_tv": loss(core_algos.compute_policy_loss_dppo_tv, clip_ratio_low=0.1, clip_ratio_high=0.15),
        "loss/dppo_kl": loss(core_algos.compute_policy_loss_dppo_kl, clip_ratio_low=0.05, clip_ratio_high=0.06),
        "loss/dro": loss(core_algos.compute_policy_loss_dro, dro_beta=0.3),
    }


def further() -> dict[str, Call]:
    """The critic's loss, divergences, and the correction of a mismatch between rollout and training."""

    def value_loss(batch: Batch) -> Tensor:
        returns = batch["values"] + batch["advantages"]
        return core_algos.compute_value_loss(batch["logprobs"], returns, batch["values"], batch["mask"], 0.2)[0]

    def divergence(name: str) -> Call:
        return lambda batch: core_algos.kl_penalty(batch["logprobs"], batch["ref_logprobs"], name)

    def weights(level: str, **numbers: object) -> Call:
        def call(batch: Batch) -> Tensor:
            ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
            return rollout_corr_helper.compute_rollout_correction_weights(ratio, batch["mask"], level, **numbers)[0]

        return call

    kinds = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl"}
    kinds |= {"k1+": "kl+", "k3+": "low_var_kl+", "abs+": "abs+", "k2+": "mse+"}
    return {
        "loss/value": value_loss,
        "correction/token": weights("token", rollout_is_threshold=1.05),
        "correction/sequence": weights("sequence", rollout_is_threshold=1.05),
        "correction/token/normalized": weights("token", rollout_is_threshold=1.05, rollout_is_batch_normalize=True),
    } | {f"kl/{ours}": divergence(theirs) for ours, theirs in kinds.items()}


def actor(**numbers: object) -> ActorConfig:
    """verl's section of the actor."""
    given = {"clip_ratio": 0.2, "strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4, **numbers}
    return ActorConfig(**given)


def token_rewards(batch: Batch) -> Tensor:
    """Scores on the last token of each row."""
    mask = batch["mask"]
    last = mask.sum(1).long() - 1
    return torch.zeros_like(mask).scatter(1, last[:, None], batch["scores"][:, None])


def groups(batch: Batch) -> np.ndarray:
    """Which prompt each row belongs to."""
    return batch["group_ids"].numpy()


if __name__ == "__main__":
    main()
