"""The critic: predicts the return from each token of a response."""

from hybridflow.algorithms.losses.value import explained_variance
from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.controller.protocols import DATA_PARALLEL, MINIBATCHES
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.factory import make_value_engine
from hybridflow.engines.training.interface import LossFn
from hybridflow.observability.metrics import Metrics, mean
from hybridflow.workers.estimation import AdvantageEstimation
from hybridflow.workers.model_worker import SEQUENCES, ModelWorker, TrainedRole, TrainingSetup
from hybridflow.workers.named_functions import ESTIMATOR_COLUMNS
from hybridflow.workers.objectives import Denominators, token_summaries, value_objective


class CriticWorker(ModelWorker):
    """A value model: its values, the advantages computed from them, and its update."""

    def __init__(self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm) -> None:
        super().__init__(context, setup)
        self._algorithm = algorithm
        self.engine = self.started(make_value_engine)
        self._estimation = AdvantageEstimation(algorithm, self.reduce)

    @transfer(DATA_PARALLEL, **SEQUENCES, provides=("values",), changes=False)
    def values(self, batch: Batch) -> Batch:
        """`values`: the value of the state before each response token."""
        return self.predict(batch, "values")

    @transfer(
        DATA_PARALLEL,
        requires=("uid", "response_mask", "scores", "values"),
        optional=(*ESTIMATOR_COLUMNS, "rollout_logprobs", "token_scores"),
        provides=("rewards", "advantages", "returns"),
    )
    def advantages(self, batch: Batch) -> Batch:
        """`rewards`, `advantages` and `returns` by an estimator with a critic (GAE)."""
        return self._estimation.estimate(batch)

    @transfer(
        MINIBATCHES,
        requires=("prompt_ids", "response_ids", "response_mask", "values", "returns"),
        optional=("fork_starts",),
    )
    def update(self, batch: Batch) -> Metrics:
        """Fits the values to the returns; metrics `<role>/*`."""
        summaries = token_summaries(batch, {"returns": "critic/returns", "values": "critic/values"})
        mask, values, returns = (batch.tokens(n).values[None] for n in ("response_mask", "values", "returns"))
        explained = float(explained_variance(values, returns, mask, reduce=self.reduce))

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            return minibatch, value_objective(self._algorithm, Denominators.of(minibatch, self.reduce))

        metrics = summaries | self.train(batch, objective, prefix="critic")
        metrics["critic/vf_explained_var"] = mean(explained)
        estimation = self._estimation.drain_metrics()
        if self.context.role == "critic":
            return metrics | estimation
        return {f"{self.context.role}/{name.removeprefix('critic/')}": metric for name, metric in metrics.items()}

    def state(self) -> dict[str, float]:
        """The KL coefficient."""
        return self._estimation.kl_controller.state()

    def restore(self, state: dict[str, float]) -> None:
        self._estimation.kl_controller.restore(state)


class CriticRole(TrainedRole):
    """The keyword arguments of a value function being trained."""

    worker_class = CriticWorker
