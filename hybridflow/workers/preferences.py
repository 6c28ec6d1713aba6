"""Preference losses for the training engines: of pairs (DPO and its variants) and of labeled responses (KTO)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms.losses.kto import reference_point
from hybridflow.algorithms.losses.ranking import accuracy
from hybridflow.algorithms.masked import masked_sum, zero_outside
from hybridflow.batch import Batch
from hybridflow.batch.iterate import ROWS_TOGETHER
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, mean
from hybridflow.workers.model_worker import Reduce
from hybridflow.workers.named_functions import (
    LABEL_OFFERS,
    PAIR_OFFERS,
    PREFERENCE_NUMBERS,
    NamedFunction,
    preference_loss,
)
from hybridflow.workers.objectives import columns_of, measured

PREFERENCE_COLUMNS = ("prompt_ids", "response_ids", "response_mask")
"""Columns of every row of preferences."""

PREFERENCE_OPTIONS = ("is_chosen", "is_mismatched", "margin", "ref_logprobs", "ref_sums")
"""Further columns that such rows may have."""

Predict = Callable[[Batch], Tensor]
"""The policy's log-probabilities [B, R] of a batch's responses, without a gradient."""


@dataclass(frozen=True)
class Responses:
    """Quantities of N responses, each [N]: sums over tokens of log pi and of log pi_ref, and numbers of tokens."""

    sums: Tensor
    reference: Tensor
    tokens: Tensor

    @staticmethod
    def of(logprobs: Tensor, columns: Mapping[str, Tensor]) -> "Responses":
        """Sums of log-probabilities [N, R]; those of the reference are 0 without one."""
        mask = columns["response_mask"]
        sums = zero_outside(logprobs, mask).sum(1)
        if "ref_sums" in columns:
            reference = columns["ref_sums"]
        elif "ref_logprobs" in columns:
            reference = zero_outside(columns["ref_logprobs"], mask).sum(1)
        else:
            reference = torch.zeros_like(sums)
        return Responses(sums, reference, mask.sum(1))

    def at(self, rows: Tensor | slice) -> "Responses":
        """A selection of the responses."""
        return Responses(self.sums[rows], self.reference[rows], self.tokens[rows])

    @property
    def offered(self) -> dict[str, Tensor]:
        """The quantities that a loss may name."""
        return {"ratios": self.ratios, "means": self.means, "sums": self.sums, "tokens": self.tokens}

    @property
    def ratios(self) -> Tensor:
        """The sums of log pi - log pi_ref."""
        return self.sums - self.reference

    @property
    def means(self) -> Tensor:
        """The mean of log pi."""
        return self.sums / self.tokens.clamp(min=1.0)


@dataclass(frozen=True)
class PreferenceUpdate:
    """Turns a minibatch of preferences into the rows that the engine trains on, and their loss."""

    algorithm: Algorithm
    reduce: Reduce
    predict: Predict

    def __call__(self, minibatch: Batch) -> tuple[Batch, LossFn]:
        """The rows to learn, and their loss with the denominators of all ranks; an `Objective`."""
        preference = self.algorithm.preference
        if "is_mismatched" not in minibatch:
            pairs, chosen_tokens = self._all(len(minibatch) / 2, _chosen_tokens(minibatch))
            loss = preference_loss(self.algorithm, PAIR_OFFERS)
            _require_reference(minibatch, loss, preference)
            return minibatch, pair_objective(loss, preference, num_pairs=pairs, chosen_tokens=chosen_tokens)
        loss = preference_loss(self.algorithm, LABEL_OFFERS)
        _require_reference(minibatch, loss, preference)
        others, own = split_mismatched(minibatch)
        mismatched = Responses.of(self.predict(others), columns_of(others))
        ratio_sum, count, liked, chosen_tokens = self._all(
            float(mismatched.ratios.double().sum()), len(own), float(own.row("is_chosen").sum()), _chosen_tokens(own)
        )
        anchor = reference_point(torch.tensor(ratio_sum), torch.tensor(count))
        counts = LabelCounts(liked, count - liked, chosen_tokens)
        return own, label_objective(loss, preference, counts, anchor=float(anchor))

    def evaluate(self, batch: Batch) -> Metrics:
        """The loss's metrics of rows that are not trained on."""
        rows, loss_fn = self(batch)
        return loss_fn({"logprobs": self.predict(rows)}, columns_of(rows)).metrics

    def _all(self, *numbers: float) -> list[float]:
        return self.reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()


@dataclass(frozen=True)
class LabelCounts:
    """Numbers of liked and of other responses in an optimizer step, and the tokens of the liked ones."""

    chosen: float
    rejected: float
    chosen_tokens: float


def pair_objective(loss: NamedFunction, preference: Preference, *, num_pairs: float, chosen_tokens: float) -> LossFn:
    """The mean loss of the pairs of the optimizer step, plus the weighted cross-entropy of the chosen responses.

    Each chosen response is followed by the rejected one. Columns: `response_mask`, `margin`, and `ref_logprobs` or
    `ref_sums`.
    """

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        responses = _compared(Responses.of(outputs["logprobs"], columns), preference)
        chosen, rejected = responses.at(slice(0, None, 2)), responses.at(slice(1, None, 2))
        offered = {f"chosen_{name}": value for name, value in chosen.offered.items()}
        offered |= {f"rejected_{name}": value for name, value in rejected.offered.items()}
        answer = loss({**offered, "margins": columns["margin"][::2], **numbers_of(preference)})
        value = _one_number_each(answer, chosen.sums, loss).sum() / num_pairs
        imitation = _imitation(outputs["logprobs"], columns, preference, chosen_tokens)
        value = value + preference.imitation * sum(imitation.values())
        rewards = [_rewards(part, loss, preference) for part in (chosen, rejected)]
        means = {
            "rewards/chosen": rewards[0].mean(),
            "rewards/rejected": rewards[1].mean(),
            "rewards/margins": (rewards[0] - rewards[1]).mean(),
            "rewards/accuracies": accuracy(*rewards),
            "logps/chosen": chosen.sums.mean(),
            "logps/rejected": rejected.sums.mean(),
        }
        totals = {"train/loss": value, **imitation}
        return Loss(value, measured(means, chosen.sums.new_tensor(len(chosen.sums)), totals))

    return LossFn(("logprobs",), loss_fn)


def label_objective(loss: NamedFunction, preference: Preference, counts: LabelCounts, *, anchor: float) -> LossFn:
    """The mean loss of the labeled responses of the optimizer step; `anchor` is KTO's z0.

    `rewards/margins` is the difference between the mean rewards of both labels, if the optimizer step has both.
    Columns: `response_mask`, `is_chosen`, and `ref_logprobs` or `ref_sums`.
    """

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        liked = columns["is_chosen"]
        responses = _compared(Responses.of(outputs["logprobs"], columns), preference)
        point = responses.sums.new_tensor(anchor)
        answer = loss({**responses.offered, "is_chosen": liked, "anchor": point, **numbers_of(preference)})
        value = _one_number_each(answer, responses.sums, loss).sum() / (counts.chosen + counts.rejected)
        imitation = _imitation(outputs["logprobs"], columns, preference, counts.chosen_tokens)
        value = value + preference.imitation * sum(imitation.values())
        rewards = _rewards(responses, loss, preference)
        threshold = torch.full_like(rewards, preference.beta * anchor)
        above, below = torch.where(liked, rewards, threshold), torch.where(liked, threshold, rewards)
        totals = {"train/loss": value, **imitation}
        if counts.chosen and counts.rejected:
            totals["rewards/margins"] = rewards[liked].sum() / counts.chosen - rewards[~liked].sum() / counts.rejected
        metrics = measured({"rewards/accuracies": accuracy(above, below)}, rewards.new_tensor(len(rewards)), totals)
        for name, rows in (("chosen", liked), ("rejected", ~liked)):
            if rows.any():
                means = {f"rewards/{name}": rewards[rows].mean(), f"logps/{name}": responses.sums[rows].mean()}
                metrics |= measured(means, rows.sum().to(rewards.dtype))
        return Loss(value, metrics | {"train/kl": mean(anchor)})

    return LossFn(("logprobs",), loss_fn)


def split_mismatched(batch: Batch) -> tuple[Batch, Batch]:
    """The rows whose response answers another prompt, and the other rows; no rows must stay together any more."""
    mismatched = batch.row("is_mismatched")
    parts = [batch.select(rows.nonzero().flatten()) for rows in (mismatched, ~mismatched)]
    others, own = (part.with_columns(meta={ROWS_TOGETHER: 1}) for part in parts)
    return others, own


def numbers_of(preference: Preference) -> dict[str, float]:
    """The numbers of the configuration that a loss may name."""
    numbers = vars(preference)
    return {name: float(numbers[name]) for name in PREFERENCE_NUMBERS}


def _compared(responses: Responses, preference: Preference) -> Responses:
    """The responses, compared with a uniform reference if `algorithm.preference.reference_free`."""
    return replace(responses, reference=torch.zeros_like(responses.sums)) if preference.reference_free else responses


def _rewards(responses: Responses, loss: NamedFunction, preference: Preference) -> Tensor:
    """beta times the ratios, or times the means for a loss without a reference."""
    compared = responses.means if _is_of_means(loss) else responses.ratios
    return preference.beta * compared.detach()


def _is_of_means(loss: NamedFunction) -> bool:
    return {"chosen_means", "means"} & loss.needs != set() and not {"chosen_ratios", "ratios"} & loss.needs


def _require_reference(batch: Batch, loss: NamedFunction, preference: Preference) -> None:
    if "ref_sums" in batch or preference.reference_free or not {"chosen_ratios", "ratios"} & loss.needs:
        return
    batch.require(("ref_logprobs",), stage=f"actor.preference_step with algorithm.preference.loss={loss.name}")


def _imitation(
    logprobs: Tensor, columns: Mapping[str, Tensor], preference: Preference, chosen_tokens: float
) -> dict[str, Tensor]:
    """The mean cross-entropy per token of the liked responses, if it has a weight."""
    if not preference.imitation:
        return {}
    liked = columns["is_chosen"]
    total_logprob = masked_sum(logprobs[liked], columns["response_mask"][liked])
    return {"train/imitation": -total_logprob / max(chosen_tokens, 1.0)}


def _chosen_tokens(batch: Batch) -> float:
    return float(batch.tokens("response_mask").row_sums()[batch.row("is_chosen")].sum())


def _one_number_each(answer: Tensor | tuple[Tensor, Tensor], like: Tensor, loss: NamedFunction) -> Tensor:
    if isinstance(answer, Tensor) and answer.shape == like.shape:
        return answer
    found = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    raise ConfigError(
        f"algorithm.preference.loss={loss.name} returned {found}, not one number for each of {len(like)}.",
        remedy="Return a tensor [N], neither summed nor averaged.",
    )
