"""Advantages from scores: token rewards, the estimator, whitening. Each rank computes those of its rows."""

import torch
from torch import Tensor

from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.kl_controller import KLController
from hybridflow.algorithms.masked import Reduce, masked_whiten, zero_outside
from hybridflow.algorithms.shaping import token_rewards
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, KLPlacement
from hybridflow.observability.metrics import Metrics, last, mean
from hybridflow.workers.named_functions import ESTIMATOR_COLUMNS, estimator, token_numbers


class AdvantageEstimation:
    """Turns `scores` into `rewards`, `advantages` and `returns`; owns the KL coefficient.

    Sums over the batch go through `reduce`, so the result does not depend on how rows are distributed, as long as one
    rank has all samples of a prompt.
    """

    def __init__(self, algorithm: Algorithm, reduce: Reduce) -> None:
        self._algorithm = algorithm
        self._reduce = reduce
        self._estimator = estimator(algorithm)
        kl = algorithm.kl
        self.kl_controller = KLController(kl.coefficient, kl.target, kl.horizon)
        self._metrics: Metrics = {}

    def estimate(self, batch: Batch) -> Batch:
        """Columns `rewards` and `advantages`, and `returns` if the estimator computes them."""
        responses = batch.tokens("response_mask")
        mask = responses.padded(0)
        rewards = self._rewards(batch, mask)
        answer = self._estimator(self._offered(batch, rewards, mask))
        advantages, returns = answer if isinstance(answer, tuple) else (answer, None)
        advantages = self._column(advantages, mask, "")
        wanted = self._algorithm.whiten_advantages
        if self._estimator.method.whitens if wanted is None else wanted:
            advantages = masked_whiten(advantages, mask, reduce=self._reduce)
        columns = {"rewards": rewards, "advantages": advantages}
        if returns is not None:
            columns["returns"] = self._column(returns, mask, " (its returns)")
        return Batch.of(tokens={n: Ragged.from_padded(c, responses.lengths) for n, c in columns.items()})

    def names(self, column: str) -> bool:
        """Whether the estimator reads a column."""
        return column in self._estimator.parameters

    def drain_metrics(self) -> Metrics:
        """Metrics of the last estimate, once; the next update reports them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _offered(self, batch: Batch, rewards: Tensor, mask: Tensor) -> dict[str, object]:
        """Everything that an estimator may name, `named_functions.ESTIMATOR_OFFERS`."""
        batch.require([n for n in ESTIMATOR_COLUMNS if n in self._estimator.needs], stage=self._estimator.name)
        columns = {
            name: batch.tokens(name).padded(0) if name in batch.token_columns else batch.row(name)
            for name in ESTIMATOR_COLUMNS
            if name in batch
        }
        numbers = {"gamma": self._algorithm.gamma, "lam": self._algorithm.lam, "reduce": self._reduce}
        own = {"rewards": rewards, "scores": rewards.sum(1), "mask": mask, "group_ids": batch.row("uid")}
        return {**columns, **numbers, **own}

    def _column(self, answer: object, mask: Tensor, which: str) -> Tensor:
        """The estimator's result as a column: checked, and 0 outside the mask."""
        numbers = token_numbers(answer, mask, of=f"algorithm.advantage={self._estimator.name}{which}")
        return zero_outside(numbers.to(mask.dtype), mask)

    def _rewards(self, batch: Batch, mask: Tensor) -> Tensor:
        scores = batch.row("scores")
        process = torch.zeros_like(mask)
        if "token_scores" in batch:
            process = batch.tokens("token_scores").padded(0) * mask
            scores = scores - process.sum(1)  # the last token gets what no token has
        if self._algorithm.kl.placement is not KLPlacement.reward:
            return token_rewards(scores, mask) + process
        policy = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
        batch.require((policy, "ref_logprobs"), stage="advantages with algorithm.kl.placement=reward")
        logprobs, reference = batch.tokens(policy).padded(0), batch.tokens("ref_logprobs").padded(0)
        kl = kl_divergence(logprobs, reference, estimator=self._algorithm.kl.estimator_in_use)
        rewards = token_rewards(scores, mask, kl=kl, kl_coefficient=self.kl_controller.coefficient)
        totals = self._reduce(torch.tensor([float((kl * mask).sum()), float(mask.sum()), len(batch)]).double())
        kl_per_token = float(totals[0] / totals[1].clamp(min=1.0))
        self._metrics = {
            "actor/reward_kl_penalty": mean(kl_per_token, float(totals[1])),
            "actor/reward_kl_penalty_coeff": last(self.kl_controller.coefficient),
        }
        self.kl_controller.update(kl_per_token, num_sequences=int(totals[2]))
        return rewards + process
