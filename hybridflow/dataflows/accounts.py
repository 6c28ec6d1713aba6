"""The account of a step: every prompt and token that entered it was trained on or discarded."""

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.ledger import Ledger
from hybridflow.dataflows.run import Run
from hybridflow.dataflows.step import check_observed
from hybridflow.observability.metrics import Metrics, last


def account(run: Run, ledger: Ledger, prompts: Batch, batch: BatchRef | None, *, step: int, is_all: bool) -> Metrics:
    """Checks what `learn` has observed once its updates have ended, and counts it; metrics of staleness.

    `batch` is what it was given; None in a synchronous run. `is_all`: it drew no further prompts. Raises `BatchError`
    if a prompt or a token was lost or duplicated.
    """
    run.calls.finish_updates()
    dataflow = run.dataflow
    if observed := [*dataflow.observed, *dataflow.unused]:
        uids = [found.row("uid") for found in observed]
        check_observed(prompts, uids, dataflow.samples_per_prompt, is_all=is_all)
    if batch is None:
        return {}
    trained = dataflow.observed or [batch]
    ledger.consume(batch, trained, dataflow.unused)
    metrics = ledger.staleness(trained, version=step, largest=run.asynchrony.max_staleness)
    metrics["async/optimizer_steps"] = last(run.optimizer_steps)
    return metrics
