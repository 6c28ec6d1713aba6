"""The vocabulary: every column's name, kind, dtype, meaning and producer.

Kinds: `row` has one value per sequence; `tokens` one per token, ragged, aligned with the token it describes;
`object` is a Python list.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch


class Kind(StrEnum):
    """How a column is laid out."""

    row = "row"
    tokens = "tokens"
    object = "object"


@dataclass(frozen=True)
class Column:
    """One entry of the vocabulary."""

    kind: Kind
    dtype: torch.dtype | None
    meaning: str
    producer: str


COLUMNS: dict[str, Column] = {
    "uid": Column(Kind.row, torch.int64, "position of the prompt in the data stream; siblings share it", "loader"),
    "sample_index": Column(Kind.row, torch.int64, "which of a prompt's samples, from 0", "Batch.repeat"),
    "prompt_ids": Column(Kind.tokens, torch.int64, "prompt tokens", "loader"),
    "prompt": Column(Kind.object, None, "the prompt as text or messages", "loader"),
    "answer": Column(Kind.object, None, "the expected answer, if the data has one", "loader"),
    "data_source": Column(Kind.object, None, "name of the file or data set the row came from", "loader"),
    "response_ids": Column(Kind.tokens, torch.int64, "response tokens, end-of-sequence included", "rollout.generate"),
    "response_mask": Column(Kind.tokens, torch.float32, "1 for tokens the policy chose", "rollout.generate"),
    "rollout_logprobs": Column(Kind.tokens, torch.float32, "log-probability when sampled", "rollout.generate"),
    "weight_version": Column(Kind.row, torch.int64, "version of the weights that sampled", "rollout.generate"),
    "truncated": Column(Kind.row, torch.bool, "the response met its length limit", "rollout.generate"),
    "scores": Column(
        Kind.row, torch.float32, "weighted sum of reward functions and models, token scores included", "reward.score"
    ),
    "token_scores": Column(
        Kind.tokens, torch.float32, "a process reward model's score of each token, times its weight", "reward.score"
    ),
    "filter_scores": Column(
        Kind.row, torch.float32, "`scores` as reward functions want groups judged by, where one says", "reward.score"
    ),
    "components": Column(Kind.row, torch.float32, "[B, F]: the score of each reward function", "reward.score"),
    "baselines": Column(Kind.row, torch.float32, "the score of the prompt's greedy response", "dataflow (ReMax)"),
    "old_logprobs": Column(Kind.tokens, torch.float32, "log-probability before the update", "actor.logprobs"),
    "sum_pi_squared": Column(
        Kind.tokens, torch.float32, "sum of the squares of the next token's probabilities", "actor.logprobs"
    ),
    "ref_logprobs": Column(Kind.tokens, torch.float32, "log-probability under the reference", "reference.logprobs"),
    "values": Column(Kind.tokens, torch.float32, "the critic's value of each response token", "critic.values"),
    "rewards": Column(Kind.tokens, torch.float32, "token rewards: score at the end, less the KL penalty", "advantages"),
    "advantages": Column(Kind.tokens, torch.float32, "advantage of each response token", "advantages"),
    "correction_weights": Column(
        Kind.tokens, torch.float32, "importance weight of the old policy against the rollout", "actor.update"
    ),
    "chosen_ids": Column(Kind.tokens, torch.int64, "tokens of the response that is preferred", "loader"),
    "rejected_ids": Column(Kind.tokens, torch.int64, "tokens of the other response", "loader"),
    "is_chosen": Column(
        Kind.row, torch.bool, "the response is liked: the preferred of a pair, or by its label", "loader"
    ),
    "is_mismatched": Column(Kind.row, torch.bool, "the response is one to another prompt", "dataflow (KTO)"),
    "mismatched_ids": Column(
        Kind.tokens, torch.int64, "tokens of a response to another prompt, where it is kept", "dataflow (KTO)"
    ),
    "margin": Column(
        Kind.row, torch.float32, "by how much the chosen response is better, where the data says", "loader"
    ),
    "ref_sums": Column(Kind.row, torch.float32, "log-probability under the reference; [B, 2] of a pair", "loader"),
    "returns": Column(Kind.tokens, torch.float32, "the critic's target", "advantages"),
}
