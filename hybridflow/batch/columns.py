"""The columns of a batch: their three kinds, operations on any kind, and the specification of every known column.

Kinds: `row` has one value per sequence; `tokens` one per token, ragged, aligned with the token it describes;
`object` is a Python list.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.ragged import Ragged

Column = Tensor | Ragged | list
"""B rows: a dense tensor [B, ...], ragged tokens [B, (tokens)], or a list of B Python values."""
Rows = tuple[int, int] | np.ndarray | Tensor | None
"""Rows of a column: start and stop, positions, or None for all."""


class Kind(StrEnum):
    """How a column is stored: as a tensor, as a `Ragged`, or as a list."""

    row = "row"
    tokens = "tokens"
    object = "object"


@dataclass(frozen=True)
class ColumnSpec:
    """The contents of a column, and the stage that produces it."""

    kind: Kind
    dtype: torch.dtype | None
    meaning: str
    producer: str


_ADVANTAGES = "actor.advantages or critic.advantages"

COLUMNS: dict[str, ColumnSpec] = {
    "uid": ColumnSpec(
        Kind.row,
        torch.int64,
        "position of the prompt in the data stream; shared by all samples of the prompt",
        "loader",
    ),
    "sample_index": ColumnSpec(
        Kind.row, torch.int64, "index of the sample among those of its prompt, from 0", "Batch.repeat"
    ),
    "prompt_ids": ColumnSpec(Kind.tokens, torch.int64, "prompt tokens", "loader"),
    "prompt": ColumnSpec(Kind.object, None, "the prompt as text or messages", "loader"),
    "answer": ColumnSpec(Kind.object, None, "the expected answer, if the data has one", "loader"),
    "data_source": ColumnSpec(Kind.object, None, "name of the file or data set the row came from", "loader"),
    "response_ids": ColumnSpec(
        Kind.tokens, torch.int64, "response tokens, including the end-of-sequence token", "rollout.generate"
    ),
    "response_mask": ColumnSpec(
        Kind.tokens,
        torch.float32,
        "1 for tokens that the policy sampled; the actor, critic and reference do not compute rows without any",
        "rollout.generate",
    ),
    "rollout_logprobs": ColumnSpec(Kind.tokens, torch.float32, "log-probability at sampling time", "rollout.generate"),
    "weight_version": ColumnSpec(
        Kind.row, torch.int64, "oldest version of the weights that sampled the response", "rollout.generate"
    ),
    "version_runs": ColumnSpec(
        Kind.tokens,
        torch.int64,
        "[B, (runs), 2]: each version of the weights that sampled the response, and the index of its first token",
        "rollout.generate",
    ),
    "truncated": ColumnSpec(Kind.row, torch.bool, "whether the response reached its length limit", "rollout.generate"),
    "scores": ColumnSpec(
        Kind.row,
        torch.float32,
        "weighted sum of all reward functions and models, token scores included",
        "reward.score",
    ),
    "token_scores": ColumnSpec(
        Kind.tokens,
        torch.float32,
        "weighted score of each token by a process reward model, or, at its last token, that of each reply of an"
        " episode, with environment.credit=turn or return_to_go",
        "reward.score or rollout.generate",
    ),
    "turn_rewards": ColumnSpec(
        Kind.tokens, torch.float32, "the environment's reward after each reply, at its last token", "rollout.generate"
    ),
    "turns": ColumnSpec(Kind.row, torch.float32, "number of replies in the episode", "rollout.generate"),
    "failed": ColumnSpec(
        Kind.row, torch.bool, "whether the episode failed; its `response_mask` is then 0", "rollout.generate"
    ),
    "fork_starts": ColumnSpec(
        Kind.tokens,
        torch.int64,
        "[B, (forks)]: where in the response a further sequence begins, with a prompt of its own",
        "rollout.generate",
    ),
    "reply_rewards": ColumnSpec(
        Kind.object,
        None,
        "the position of each reply in `messages`, and the environment's reward after it",
        "rollout.generate",
    ),
    "episode_return": ColumnSpec(
        Kind.object, None, "sum of the environment's rewards, discounted with credit=return_to_go", "rollout.generate"
    ),
    "messages": ColumnSpec(Kind.object, None, "the conversation of the episode", "rollout.generate"),
    "fork_places": ColumnSpec(
        Kind.object, None, "the positions in `messages` at which further sequences begin", "rollout.generate"
    ),
    "stderr": ColumnSpec(
        Kind.object, None, "the end of the standard error of the episode's program", "rollout.generate"
    ),
    "filter_scores": ColumnSpec(
        Kind.row, torch.float32, "scores for filtering groups, if a reward function returns such", "reward.score"
    ),
    "components": ColumnSpec(Kind.row, torch.float32, "[B, F]: the score of each reward function", "reward.score"),
    "baselines": ColumnSpec(Kind.row, torch.float32, "the score of the prompt's greedy response", "dataflow (ReMax)"),
    "old_logprobs": ColumnSpec(Kind.tokens, torch.float32, "log-probability before the update", "actor.logprobs"),
    "sum_pi_squared": ColumnSpec(
        Kind.tokens, torch.float32, "sum of the squares of the next token's probabilities", "actor.logprobs"
    ),
    "ref_logprobs": ColumnSpec(
        Kind.tokens, torch.float32, "log-probability under the reference model", "reference.logprobs"
    ),
    "values": ColumnSpec(Kind.tokens, torch.float32, "the critic's value of each response token", "critic.values"),
    "rewards": ColumnSpec(
        Kind.tokens, torch.float32, "reward of each token: the score at the last one, less the KL penalty", _ADVANTAGES
    ),
    "advantages": ColumnSpec(Kind.tokens, torch.float32, "advantage of each response token", _ADVANTAGES),
    "correction_weights": ColumnSpec(
        Kind.tokens, torch.float32, "importance weight of the old policy against the rollout", "actor.update"
    ),
    "chosen_ids": ColumnSpec(Kind.tokens, torch.int64, "tokens of the preferred response", "loader"),
    "rejected_ids": ColumnSpec(Kind.tokens, torch.int64, "tokens of the rejected response", "loader"),
    "is_chosen": ColumnSpec(
        Kind.row, torch.bool, "whether the response is the preferred one of a pair, or labeled desirable", "loader"
    ),
    "is_mismatched": ColumnSpec(
        Kind.row, torch.bool, "whether the response belongs to another prompt", "dataflow (KTO)"
    ),
    "mismatched_ids": ColumnSpec(Kind.tokens, torch.int64, "tokens of a response to another prompt", "dataflow (KTO)"),
    "margin": ColumnSpec(
        Kind.row, torch.float32, "how much better the chosen response is, if the data says so", "loader"
    ),
    "ref_sums": ColumnSpec(
        Kind.row, torch.float32, "summed log-probability under the reference model; [B, 2] for pairs", "loader"
    ),
    "returns": ColumnSpec(Kind.tokens, torch.float32, "the critic's target", _ADVANTAGES),
}


def producers(name: str) -> set[str]:
    """The stages that produce a column of `COLUMNS`."""
    return {*COLUMNS[name].producer.split(" or ")}


def missing_columns_remedy(missing: Iterable[str]) -> str:
    """The remedy for a stage whose batch lacks these columns: the calls that add them."""
    added = [f"'{name}' is added by {COLUMNS[name].producer}" for name in missing if name in COLUMNS]
    return f"Join the call that adds them before this one{': ' if added else ''}{', '.join(added)}."


def chosen(column: Column, rows: Rows) -> Column:
    """Some rows of a column: itself for all, a view for a range, a copy for positions."""
    if rows is None:
        return column
    if isinstance(rows, tuple):
        start, stop = rows
        return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    index = torch.as_tensor(rows, dtype=torch.int64)
    return column.select(index) if isinstance(column, Ragged) else column[index]


def concatenated(parts: Sequence[Column]) -> Column:
    """Columns of one kind, concatenated; a single one is returned as is."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if tensors:
        return torch.cat(tensors)
    return Ragged.concat(ragged) if ragged else [value for part in parts if isinstance(part, list) for value in part]


def nbytes(columns: Mapping[str, Column]) -> int:
    """Bytes of the tensors of some columns; lists of Python values are not counted."""
    total = 0
    for column in columns.values():
        if isinstance(column, Ragged):
            total += column.values.nbytes + column.offsets.nbytes
        elif isinstance(column, Tensor):
            total += column.nbytes
    return total


def num_token_ids(columns: Mapping[str, Column]) -> int:
    """Tokens in the columns of token ids, such as `prompt_ids` and `response_ids`."""
    return sum(
        len(column.values) for name, column in columns.items() if isinstance(column, Ragged) and name.endswith("_ids")
    )


def num_tokens(columns: Mapping[str, Column]) -> int:
    """Tokens in the columns of token ids; without any, in the longest token column."""
    lengths = (len(column.values) for column in columns.values() if isinstance(column, Ragged))
    return num_token_ids(columns) or max(lengths, default=0)


def by_kind(columns: Mapping[str, Column]) -> tuple[dict[str, Tensor], dict[str, Ragged], dict[str, list]]:
    """Row, token and object columns apart."""
    rows = {name: column for name, column in columns.items() if isinstance(column, Tensor)}
    tokens = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    objects = {name: column for name, column in columns.items() if isinstance(column, list)}
    return rows, tokens, objects
