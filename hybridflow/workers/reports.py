"""What a worker says of the columns it sees."""

from collections.abc import Mapping

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.observability.metrics import Metrics, maximum, mean, minimum


def token_summaries(batch: Batch, names: Mapping[str, str]) -> Metrics:
    """Mean, maximum and minimum over the tokens that count of each token column: column name -> metric name."""
    mask = batch.tokens("response_mask").values.bool()
    metrics: Metrics = {}
    for column, name in names.items():
        if column in batch:
            metrics |= _summary(name, batch.tokens(column).values[mask])
    return metrics


def row_summaries(batch: Batch, column: str, name: str) -> Metrics:
    """Mean, maximum and minimum over sequences of a token column's sums, as verl reports `critic/rewards`."""
    return _summary(name, batch.tokens(column).row_sums()) if column in batch else {}


def _summary(name: str, values: Tensor) -> Metrics:
    if not len(values):
        return {}
    return {
        f"{name}/mean": mean(float(values.mean()), len(values)),
        f"{name}/max": maximum(float(values.max())),
        f"{name}/min": minimum(float(values.min())),
    }
