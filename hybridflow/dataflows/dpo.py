"""Direct preference optimisation (arXiv:2305.18290) and its kin: IPO, SLiC, ORPO, SimPO (`algorithm.preference`)."""

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
    """One step per batch of response pairs; a rollout and a reward only serve the evaluation."""

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
        """What `dataflow_settings.*` may say."""

        precompute_reference: bool = False
        """Work out once, before the first step, what the model as it begins says of all pairs; load no reference."""

    @classmethod
    def wants_reference(cls, config: Experiment) -> bool:
        """Unless the loss compares with none, or its part is precomputed."""
        return compares_with_reference(config)

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of pairs."""
        metrics = wait(self.actor.preference_step(self._compared(prompts)))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """The same of held-out pairs: how often, and by how much, the chosen response has the higher reward."""
        return evaluated_by_source(held_out, lambda pairs: self.actor.evaluate(self._compared(pairs)))

    def foreknown(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`ref_sums` [B, 2] of pairs."""
        if not self.settings.precompute_reference or "ref_sums" in rows:
            return {}
        return {"ref_sums": reference_sums(rows_of_pairs(rows), self.actor, self.reference)}

    def _compared(self, pairs: Batch) -> Batch | BatchRef:
        rows = rows_of_pairs(pairs)
        return self.reference.logprobs(rows) if self.reference and "ref_sums" not in rows else rows
