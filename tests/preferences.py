"""Pairs and labeled responses of toy tokens, and the losses of them in plain loops over a worker's own words."""

import torch

from hybridflow.batch import Batch
from hybridflow.dataflows.kto import with_mismatched
from hybridflow.dataflows.pairs import rows_of_pairs
from hybridflow.workers.actor import ActorWorker
from tests.oracles import preferences as oracle
from tests.toys import numbers_like, token_rows

PAIRS = 6
CHOSEN, REJECTED = [5, 2, 1, 9, 3, 4], [1, 8, 3, 4, 2, 6]


def pairs(margins: tuple[float, ...] = (0.0, 1.0, 0.5, 0.0, 0.2, 0.0)) -> Batch:
    """Two rows a pair, of unequal lengths, with what a reference says of them."""
    tokens = {
        "prompt_ids": token_rows([3, 1, 7, 4, 2, 5], seed=0),
        "chosen_ids": token_rows(CHOSEN, seed=1),
        "rejected_ids": token_rows(REJECTED, seed=2),
    }
    rows = {"uid": torch.arange(PAIRS), "margin": torch.tensor(margins)}
    return compared(rows_of_pairs(Batch.of(rows=rows, tokens=tokens)))


def labeled(liked: tuple[bool, ...] = (True, False, True, True, False, False)) -> Batch:
    """Two rows a response, itself and one to another prompt, with what a reference says of them."""
    tokens = {"prompt_ids": token_rows([3, 1, 7, 4, 2, 5], seed=0), "response_ids": token_rows(CHOSEN, seed=1)}
    rows = {"uid": torch.arange(PAIRS), "is_chosen": torch.tensor(liked)}
    return compared(with_mismatched(Batch.of(rows=rows, tokens=tokens)))


def compared(rows: Batch) -> Batch:
    """Random log-probabilities of a reference, about as large as a random model's."""
    column = numbers_like(rows.tokens("response_ids"), seed=7, scale=0.5)
    return rows.with_columns(tokens={"ref_logprobs": column.like(column.values - 4.0)})


def log_ratios(worker: ActorWorker, rows: Batch) -> list[float]:
    """Of each row, by what the worker says of its tokens."""
    said = worker.logprobs(rows).tokens("old_logprobs").rows()
    known = rows.tokens("ref_logprobs").rows()
    return [oracle.log_ratio(ours.tolist(), theirs.tolist()) for ours, theirs in zip(said, known, strict=True)]
