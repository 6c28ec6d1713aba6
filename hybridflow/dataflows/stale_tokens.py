"""Which weights sampled the tokens of a batch: metrics, and a mask for tokens that are too old."""

import torch

from hybridflow.batch import Batch
from hybridflow.batch.versions import token_versions
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.observability.metrics import Metrics, last


def without_stale_tokens(batch: BatchRef, oldest: int) -> tuple[BatchRef, int]:
    """The batch, in which tokens of versions before `oldest` have `response_mask` 0, and the number of tokens that did
    not have it before.

    `weight_version` is at least `oldest`. Its companions are masked too, because `learn` may join their columns to the
    batch; their tokens are not counted.
    """
    companions = {name: without_stale_tokens(other, oldest)[0] for name, other in batch.companions.items()}
    masked, num_masked = _masked(batch, oldest)
    return masked.with_companions(**companions) if companions else masked, num_masked


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


def _masked(batch: BatchRef, oldest: int) -> tuple[BatchRef, int]:
    if not batch.declares("version_runs"):  # a companion that was not sampled
        return batch, 0
    versions = batch.row("weight_version")
    if bool((versions >= oldest).all()):
        return batch, 0
    tokens = batch.fetch(["version_runs", "response_mask"])
    mask, runs = tokens.tokens("response_mask"), tokens.tokens("version_runs")
    is_kept = token_versions(runs, batch.tokens_of("response_ids")).values >= oldest
    masked = Batch.of(
        rows={"weight_version": versions.clamp(min=oldest)},
        tokens={"response_mask": mask.like(mask.values * is_kept)},
    )
    return batch.join(masked), int((~is_kept & (mask.values > 0)).sum())
