"""The length of the responses that are trained on, compared with all that have finished: groups may be discarded."""

from collections.abc import Sequence

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.observability.metrics import Metrics, last


class LengthRatio:
    """Counts responses and their tokens since the beginning of the run.

    ratio = LengthRatio()
    metrics = ratio.after(batch, rows=16, tokens=400)  # 16 responses of 400 tokens have finished so far
    """

    def __init__(self, trained: Sequence[int] = (0, 0)) -> None:
        """`trained` is that of a checkpoint."""
        self.trained = [*trained]
        """Responses that were trained on, and their tokens."""

    def after(self, batch: BatchRef, *, rows: int, tokens: int) -> Metrics:
        """`async/length_ratio` after a step on a batch; `rows` responses of `tokens` tokens have finished."""
        self.trained[0] += len(batch)
        self.trained[1] += int(batch.tokens_of("response_ids").sum())
        ratio = (self.trained[1] / self.trained[0]) / (tokens / rows) if tokens else 1.0
        return {"async/length_ratio": last(ratio)}
