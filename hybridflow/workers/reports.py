"""What a worker says of the columns it sees."""

from collections.abc import Mapping

from hybridflow.batch import Batch
from hybridflow.observability.metrics import Metrics, maximum, mean, minimum


def column_summaries(batch: Batch, names: Mapping[str, str]) -> Metrics:
    """Mean, maximum and minimum over the tokens that count of each token column: column name -> metric name."""
    mask = batch.tokens("response_mask").values.bool()
    metrics: Metrics = {}
    for column, name in names.items():
        if column not in batch or not mask.any():
            continue
        values = batch.tokens(column).values[mask]
        metrics |= {
            f"{name}/mean": mean(float(values.mean()), len(values)),
            f"{name}/max": maximum(float(values.max())),
            f"{name}/min": minimum(float(values.min())),
        }
    return metrics
