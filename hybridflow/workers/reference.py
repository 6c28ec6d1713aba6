"""The reference: the frozen model from which the policy's KL divergence is measured."""

from dataclasses import dataclass
from typing import ClassVar

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.training import Training
from hybridflow.controller.protocols import DATA_PARALLEL
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.interface import Part
from hybridflow.workers.masked_rows import predicted
from hybridflow.workers.model_worker import SEQUENCES, frozen_engine


class ReferenceWorker(Worker):
    """The log-probabilities of a frozen language model."""

    def __init__(self, context: WorkerContext, *, model: Model, training: Training, temperature: float) -> None:
        super().__init__(context)
        self._engine = frozen_engine(make_language_engine, model, training, context)
        self._temperature = temperature
        self._is_offloaded = training.offload_parameters

    @transfer(DATA_PARALLEL, **SEQUENCES, provides=("ref_logprobs",), changes=False)
    def logprobs(self, batch: Batch) -> Batch:
        """`ref_logprobs`: the reference's log-probabilities of the responses, at the policy's temperature."""
        outputs = predicted(self._engine, batch, ("logprobs",), temperature=self._temperature)
        if self._is_offloaded:
            self._engine.offload(Part.parameters)
        return Batch.of(tokens={"ref_logprobs": outputs.tokens("logprobs")})


@dataclass(frozen=True)
class ReferenceRole:
    """The keyword arguments of a frozen language model."""

    worker_class: ClassVar[type[Worker]] = ReferenceWorker
    model: Model
    training: Training
    temperature: float
