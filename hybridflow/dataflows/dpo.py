"""Direct preference optimization (arXiv:2305.18290) and variants: IPO, SLiC, ORPO, SimPO (`algorithm.preference`)."""

from dataclasses import dataclass

from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.config.experiment import Experiment
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pairs import compares_with_reference, reference_sums, rows_of_pairs
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.dataflows.stages import evaluated_by_source
from hybridflow.observability.metrics import Metrics


class DPO(Dataflow):
    """One step per batch of response pairs; rollout and reward are only for the evaluation."""

    data = "preferences"
    rows_per_prompt = 2
    provides = ()

    actor: Policy
    reference: FrozenModel | None
    rollout: Sampler | None
    reward: Scorer | None

    settings: "DPO.Settings"

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        precompute_reference: bool = False
        """Compute the reference log-probabilities once, before the first step, instead of loading a reference."""

    @classmethod
    def wants_reference(cls, config: Experiment) -> bool:
        """True, unless the loss reads no reference or its log-probabilities are precomputed."""
        return compares_with_reference(config)

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of pairs."""
        metrics = wait(self.actor.preference_step(self._with_reference(prompts)))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """Metrics of held-out pairs: how often, and by how much, the chosen response has the higher reward."""
        return evaluated_by_source(held_out, lambda pairs: self.actor.evaluate(self._with_reference(pairs)))

    def precompute(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`ref_sums` [B, 2] of pairs."""
        if not self.settings.precompute_reference or "ref_sums" in rows:
            return {}
        return {"ref_sums": reference_sums(rows_of_pairs(rows), self.actor, self.reference)}

    def _with_reference(self, pairs: Batch) -> Batch | BatchRef:
        rows = rows_of_pairs(pairs)
        return self.reference.logprobs(rows) if self.reference and "ref_sums" not in rows else rows
