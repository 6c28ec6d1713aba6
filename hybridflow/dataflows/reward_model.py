"""Reward modeling on pairs of responses (arXiv:2203.02155)."""

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pairs import rows_of_pairs
from hybridflow.dataflows.roles import TrainableRewardModel
from hybridflow.dataflows.stages import evaluated_by_source
from hybridflow.observability.metrics import Metrics


class RewardModeling(Dataflow):
    """One ranking step per batch of pairs."""

    data = "preferences"
    rows_per_prompt = 2
    provides = ()

    reward_model: TrainableRewardModel

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of pairs."""
        return wait(self.reward_model.preference_step(rows_of_pairs(prompts)))

    def evaluate(self, held_out: Batch) -> Metrics:
        """`val-core/<source>/acc`, the fraction of held-out pairs in the right order (ties count half), and more."""
        return evaluated_by_source(held_out, lambda pairs: self.reward_model.evaluate(rows_of_pairs(pairs)))
