"""Direct preference optimization (arXiv:2305.18290) and variants: IPO, SLiC, ORPO, SimPO (`algorithm.preference`)."""

from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.batch import Batch, Ragged
from hybridflow.config.choices import chosen
from hybridflow.config.experiment import Experiment
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pairs import rows_of_pairs
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
    def wants_reference(cls, config: Experiment, settings: object) -> bool:
        """True, unless the loss reads no reference or its log-probabilities are precomputed."""
        preference = config.algorithm.preference
        if vars(settings).get("precompute_reference"):
            return False
        method = PREFERENCE_LOSSES.get(chosen(preference.loss, "algorithm.preference.loss", PREFERENCE_LOSSES))
        return not preference.reference_free and (method is None or method.compares_with_reference)

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of preferences."""
        metrics = wait(self.actor.preference_step(self._with_reference(self.rows(prompts))))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """Metrics of held-out preferences: how often, and by how much, the better response has the higher reward."""
        sources = [source for source in held_out.object("data_source") for _ in range(2)]
        rows = self.rows(held_out).with_columns(objects={"data_source": sources})
        return evaluated_by_source(rows, lambda part: self.actor.evaluate(self._with_reference(part)))

    def precompute(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`ref_sums` [B, 2] of both responses, from the reference model or from the policy before its first step."""
        if not self.settings.precompute_reference or "ref_sums" in rows:
            return {}
        both, name = self.rows(rows), "ref_logprobs" if self.reference else "old_logprobs"
        answer = self.reference.logprobs(both) if self.reference else self.actor.logprobs(both)
        return {"ref_sums": answer.fetch().tokens(name).row_sums().view(-1, 2)}

    def rows(self, preferences: Batch) -> Batch:
        """Two rows per preference: for pairs, the chosen response and the rejected one."""
        return rows_of_pairs(preferences)

    def _with_reference(self, rows: Batch) -> Batch | BatchRef:
        return self.reference.logprobs(rows) if self.reference and "ref_sums" not in rows else rows
