"""The losses of TRL 1.16's trainers on seeded batches; run by that environment's Python.

    .peers/trl/bin/python benchmarks/peers/trl_functions.py tests/parity/peers/trl.json

The trainers' own loss methods are called on objects that have their settings and nothing else, with a model that
answers given log-probabilities. The file holds the batches as well.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator
from random_batches import Rounded, batches, rounded
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

Batch = dict[str, Tensor]
Call = Callable[[Batch], Tensor]
ACCELERATOR = Accelerator(cpu=True)


def main() -> None:
    """Writes all results to the file that the command line names."""
    results: dict[str, dict] = {"trl": trl.__version__, "batches": {}, "results": {}}
    for name, batch in batches().items():
        results["batches"][name] = {column: rounded(values) for column, values in batch.items()}
        for function, call in {**policy_losses(), **preference_losses()}.items():
            results["results"].setdefault(function, {})[name] = answer(call, batch)
    Path(sys.argv[1]).write_text(json.dumps(results, separators=(",", ":")) + "\n")


def answer(call: Call, batch: Batch) -> dict[str, Rounded]:
    """A loss on a copy of the batch, and its gradient to `logprobs`."""
    copied = {name: values.clone() for name, values in batch.items()}
    copied["logprobs"].requires_grad_()
    value = call(copied)
    (gradient,) = torch.autograd.grad(value, copied["logprobs"])
    return {"value": rounded(value.detach()), "gradient": rounded(gradient)}


def trainer(**settings: object) -> SimpleNamespace:
    """A stand-in for a trainer: its settings, and places for its metrics."""
    model = SimpleNamespace(training=False, config=SimpleNamespace())
    return SimpleNamespace(
        model=model,
        accelerator=ACCELERATOR,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        aux_loss_enabled=False,
        **settings,
    )


def policy_losses() -> dict[str, Call]:
    """Losses of GRPOTrainer, with one advantage per sequence (the first token's)."""

    def loss(loss_type: str, level: str = "token", **settings: object) -> Call:
        def call(batch: Batch) -> Tensor:
            given = {
                "loss_type": loss_type,
                "importance_sampling_level": level,
                "beta": 0.0,
                "epsilon_low": 0.1,
                "epsilon_high": 0.15,
                "top_entropy_quantile": 1.0,
                "off_policy_mask_threshold": None,
                "use_vllm": False,
                "max_completion_length": 7,
                "current_gradient_accumulation_steps": 1,
                "_entropy_bonus_enabled": False,
                "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, **settings.pop("args", {})),
                **settings,
            }
            stand_in = trainer(**given)
            stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (
                batch["logprobs"],
                torch.zeros_like(batch["logprobs"]),
                None,
            )
            ids = torch.ones_like(batch["mask"]).long()
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1],
                "completion_ids": ids,
                "completion_mask": batch["mask"],
                "advantages": batch["advantages"][:, 0],
                "old_per_token_logps": batch["old_logprobs"],
                "ref_per_token_logps": batch["ref_logprobs"],
                "num_items_in_batch": batch["mask"].sum(),
            }
            return trl.GRPOTrainer._compute_loss(stand_in, None, inputs)

        return call

    sapo = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    return {
        "loss/grpo": loss("grpo"),
        "loss/dapo": loss("dapo"),
        "loss/dr_grpo": loss("dr_grpo"),
        "loss/gspo": loss("grpo", "sequence"),
        "loss/cispo": loss("cispo", epsilon_high=1.15),
        "loss/sapo": loss("sapo", args=sapo),
        "loss/grpo+kl": loss("grpo", beta=0.3),
    }


def preference_losses() -> dict[str, Call]:
    """Losses of DPOTrainer, KTOTrainer, RewardTrainer and their kin. The first half of the rows are the chosen ones."""
    return {
        "preference/sigmoid": dpo("sigmoid"),
        "preference/hinge": dpo("hinge"),
        "preference/ipo": dpo("ipo"),
        "preference/orpo": orpo,
        "preference/simpo": simpo(0.0),
        "preference/kto": kto,
        "preference/bradley_terry": bradley_terry(0.0),
        "preference/bradley_terry+center": bradley_terry(0.01),
        "preference/sigmoid+smoothing": smoothed,
        "preference/simpo+smoothing": simpo(0.2),
    }


def dpo(loss_type: str) -> Call:
    """A loss of pairs, against the reference, with beta 0.1."""

    def call(batch: Batch) -> Tensor:
        stand_in = trainer(
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=0.1,
            label_smoothing=0.0,
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            precompute_ref_logps=True,
        )
        reference = (batch["ref_logprobs"] * batch["mask"]).sum(1)
        chosen, rejected = reference.chunk(2)
        inputs = sequences(batch) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return trl.DPOTrainer._compute_loss(stand_in, model_that_says(batch), inputs, False)

    return call


def kto(batch: Batch) -> Tensor:
    """KTO with labels that alternate and the divergence of the mismatched rows, which are the batch rolled by one."""
    stand_in = trainer(
        loss_type="kto",
        beta=0.1,
        calculate_KL=True,
        desirable_weight=1.0,
        undesirable_weight=1.3,
        precompute_ref_logps=True,
    )
    policy = ((batch["logprobs"] * batch["mask"]).sum(1)).detach().roll(1)
    reference = (batch["ref_logprobs"] * batch["mask"]).sum(1)
    stand_in._compute_kl_logps = lambda model, given: policy
    inputs = sequences(batch) | {
        "label": torch.arange(len(batch["mask"])) % 2 == 0,
        "ref_logps": reference,
        "ref_KL_logps": reference.roll(1),
    }
    return trl.KTOTrainer._compute_loss(stand_in, model_that_says(batch), inputs, False)


def orpo(batch: Batch) -> Tensor:
    """The odds-ratio part, on mean log-probabilities, with beta 0.1; TRL subtracts it from the cross-entropy."""
    chosen, rejected = means(batch).chunk(2)
    return -ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), chosen, rejected)[0].mean()


def simpo(label_smoothing: float) -> Call:
    """SimPO on mean log-probabilities, with beta 2 and gamma 1."""

    def call(batch: Batch) -> Tensor:
        chosen, rejected = means(batch).chunk(2)
        settings = {"beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": label_smoothing, "alpha": 0.0}
        return CPOTrainer.cpo_loss(trainer(loss_type="simpo", **settings), chosen, rejected)[0].mean()

    return call


def smoothed(batch: Batch) -> Tensor:
    """CPO's sigmoid loss with label smoothing 0.2, on log-ratios: TRL's DPO has no smoothing of its own."""
    chosen, rejected = ((batch["logprobs"] - batch["ref_logprobs"]) * batch["mask"]).sum(1).chunk(2)
    stand_in = trainer(loss_type="sigmoid", beta=0.1, label_smoothing=0.2, alpha=0.0)
    return CPOTrainer.cpo_loss(stand_in, chosen, rejected)[0].mean()


def bradley_terry(center: float) -> Call:
    """A reward model's loss, with margins, where sums of log-probabilities stand in for scores."""

    def call(batch: Batch) -> Tensor:
        stand_in = trainer(args=SimpleNamespace(center_rewards_coefficient=center or None))
        scores = (batch["logprobs"] * batch["mask"]).sum(1)
        inputs = {"margin": batch["baselines"][: len(scores) // 2]}

        def model(**given: object) -> SimpleNamespace:
            return SimpleNamespace(logits=scores[:, None])

        return trl.RewardTrainer.compute_loss(stand_in, model, inputs)

    return call


def sequences(batch: Batch) -> Batch:
    """Prompts of one token and the responses of the batch."""
    prompt = torch.zeros_like(batch["mask"][:, :1])
    mask = torch.cat([prompt, batch["mask"]], 1).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def model_that_says(batch: Batch) -> Callable[..., SimpleNamespace]:
    """A model whose log-probabilities are the batch's."""
    logprobs = batch["logprobs"] * batch["mask"]
    nothing = torch.zeros_like(logprobs)

    def model(**given: object) -> SimpleNamespace:
        return SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    return model


def means(batch: Batch) -> Tensor:
    """Mean log-probability of each response."""
    return (batch["logprobs"] * batch["mask"]).sum(1) / batch["mask"].sum(1)


if __name__ == "__main__":
    main()
