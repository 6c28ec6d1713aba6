"""Which weights sampled the tokens of a batch: metrics, and a mask for tokens that are too old."""

import torch

from hybridflow.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.batch.versions import token_versions
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.observability.metrics import Metrics, last


def without_stale_tokens(batch: BatchRef, oldest: int) -> tuple[BatchRef, int]:
    """The batch, in which tokens of versions before `oldest` have `response_mask` 0, and the number of these tokens.

    `weight_version` is that of the oldest remaining token, or `oldest` if a response has none.
    """
    versions = batch.row("weight_version")
    if bool((versions >= oldest).all()):
        return batch, 0
    lengths = batch.tokens_of("response_ids")
    is_kept = token_versions(batch.fetch(["version_runs"]).tokens("version_runs"), lengths).values >= oldest
    masked = Batch.of(
        rows={"weight_version": versions.clamp(min=oldest)},
        tokens={"response_mask": Ragged.from_lengths(is_kept.float(), lengths)},
    )
    return batch.join(masked), int((~is_kept).sum())


def version_metrics(batch: BatchRef) -> Metrics:
    """`async/versions_per_response`, `async/interrupted_fraction` and `async/reprefill_tokens`.

    The last counts the tokens of prompts and responses that were read again because the weights had changed.
    """
    runs = batch.tokens_of("version_runs")
    is_first = torch.zeros(int(runs.sum()), dtype=torch.bool)
    is_first[runs.cumsum(0) - runs] = True
    prompts = batch.tokens_of("prompt_ids").repeat_interleave(runs)
    read_again = prompts + batch.fetch(["version_runs"]).tokens("version_runs").values[:, 1]
    return {
        "async/versions_per_response": last(float(runs.float().mean())),
        "async/interrupted_fraction": last(float((runs > 1).float().mean())),
        "async/reprefill_tokens": last(int(read_again[~is_first].sum())),
    }
