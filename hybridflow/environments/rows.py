"""The columns of a batch from finished episodes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.episode_counts import COUNTED, DEADLINE, NUMBER, WITH_NUMBER
from hybridflow.batch.wire import Meta
from hybridflow.environments.interface import Finished
from hybridflow.environments.transcript import Transcript, TranscriptRow
from hybridflow.errors import EpisodeError


@dataclass(frozen=True)
class EpisodeResult:
    """The end of an episode: its transcript (None without a trained reply), and its rewards (None if it failed)."""

    transcript: Transcript | None
    ended: Finished | None
    turns: int
    is_truncated: bool
    limit: str | None
    """The limit that it has reached."""


def episode_columns(
    prompts: Batch,
    results: Sequence[EpisodeResult],
    meta: Meta,
    *,
    discount: float | None = None,
    version: int | None,
) -> Batch:
    """The columns that episodes add to their `prompts`, one row each.

    `prompt_ids` and `prompt` are the first prompt. `response_ids` [B, (R)] is everything after it up to the end of the
    last reply. `response_mask` is 1 for sampled tokens and 0 for observations; `rollout_logprobs` is 0 there.
    `fork_starts` [B, (forks)] are the positions in the response at which a fork begins: the tokens of its prompt, which
    are masked, and those after them are a sequence of their own.

    `reply_rewards` has the place of each reply in `messages` and the reward after it, and `turn_rewards` [B, (R)] has
    each at the last token of its reply. `episode_return` is the sum of an episode's rewards, `turns` the number of
    replies, `messages` the conversation, `fork_places` where forks begin in it, `stderr` what its program wrote to its
    standard error, `failed` whether the episode failed.

    A failed episode has a mask of zeros, and the mean return of its group's other episodes, so that it changes neither
    the weights nor the group's mean. `meta` is that of the responses; that of the result also has `info_sums`.

    With a `discount` per reply, `token_scores` [B, (R)] has the score of each reply (`reply_scores`) at its last token,
    and `episode_return` is their sum: the discounted return.

    `version` is that of an episode without a reply to train on. Raises `EpisodeError` if it is None, because the model
    has not replied at all, and there is such an episode.
    """
    rows = [_row(result, prompts, index) for index, result in enumerate(results)]
    rewards = [reply_rewards(row, result.ended) for row, result in zip(rows, results, strict=True)]
    places = [[] if result.transcript is None else result.transcript.reply_places for result in results]
    forks = sum(result.transcript.num_forks for result in results if result.transcript is not None)
    runs = _version_runs(rows, results, version)
    columns = Batch.of(
        rows={
            "weight_version": torch.tensor([min(own)[0] for own in runs], dtype=torch.int64),
            "truncated": torch.tensor([result.is_truncated for result in results], dtype=torch.bool),
            "turns": torch.tensor([result.turns for result in results], dtype=torch.float32),
            "failed": torch.tensor([result.ended is None for result in results], dtype=torch.bool),
        },
        tokens=_token_columns(rows, rewards, runs),
        objects={
            "prompt": [_first_prompt(result, prompts, index) for index, result in enumerate(results)],
            "episode_return": _returns(
                results, rows, prompts.row("uid").tolist(), 1.0 if discount is None else discount
            ),
            "reply_rewards": [[*zip(*pair, strict=True)] for pair in zip(places, rewards, strict=True)],
            "messages": [[] if result.transcript is None else result.transcript.history for result in results],
            "stderr": ["" if result.ended is None else result.ended.stderr for result in results],
            "fork_places": [[] if result.transcript is None else result.transcript.fork_places for result in results],
        },
        meta=meta | info_sums(results) | ({f"{COUNTED}forks": float(forks)} if forks else {}),
    )
    if discount is None:
        return columns
    scores = [_at_last_tokens(row, reply_scores(own, discount)) for row, own in zip(rows, rewards, strict=True)]
    return columns.with_columns(tokens={"token_scores": Ragged.from_rows(scores, torch.float32)})


def reply_rewards(row: TranscriptRow, ended: Finished | None) -> list[float]:
    """The reward after each reply; the last reply gets what has no reply, and a failed episode zeros."""
    rewards = [0.0] * len(row.replies)
    for turn, reward in enumerate(ended.rewards if ended is not None and rewards else ()):
        rewards[min(turn, len(rewards) - 1)] += reward
    return rewards


def reply_scores(rewards: Sequence[float], gamma: float) -> list[float]:
    """The scores of an episode's replies, whose sums from each reply on are the returns of the replies.

    s_k = G_k - G_{k+1} = r_k - (1 - gamma) G_{k+1}, where G_k = r_k + gamma G_{k+1} (Sutton and Barto, 2018, eq. 3.9),
    so an estimator of rewards per token that does not discount gives each token of reply k the return G_k.
    """
    scores, later = [], 0.0
    for reward in reversed(rewards):
        scores.append(reward - (1.0 - gamma) * later)
        later = reward + gamma * later
    return scores[::-1]


def info_sums(results: Sequence[EpisodeResult]) -> Meta:
    """For each number in the information of episodes: its sum over those that have it, and how many do."""
    sums: dict[str, float] = {}
    for result in results:
        for name, value in ({} if result.ended is None else result.ended.info).items():
            if isinstance(value, int | float) and math.isfinite(value):
                for key, added in ((f"{NUMBER}{name}", value), (f"{WITH_NUMBER}{name}", 1)):
                    sums[key] = sums.get(key, 0.0) + added
    return {**sums}


def _token_columns(
    rows: Sequence[TranscriptRow], rewards: Sequence[list[float]], runs: Sequence[list[tuple[int, int]]]
) -> dict[str, Ragged]:
    """The columns with numbers per token, and the runs of versions."""
    turn_rewards = [_at_last_tokens(row, values) for row, values in zip(rows, rewards, strict=True)]
    every_run = torch.tensor([run for own in runs for run in own], dtype=torch.int64).reshape(-1, 2)
    return {
        "prompt_ids": Ragged.from_rows([row.prompt_ids for row in rows], torch.int64),
        "response_ids": Ragged.from_rows([row.response_ids for row in rows], torch.int64),
        "response_mask": Ragged.from_rows([row.mask for row in rows], torch.float32),
        "rollout_logprobs": Ragged.from_rows([row.logprobs for row in rows], torch.float32),
        "fork_starts": Ragged.from_rows([row.fork_starts for row in rows], torch.int64),
        "version_runs": Ragged.from_lengths(every_run, torch.tensor([len(own) for own in runs], dtype=torch.int64)),
        "turn_rewards": Ragged.from_rows(turn_rewards, torch.float32),
    }


def _at_last_tokens(row: TranscriptRow, rewards: Sequence[float]) -> list[float]:
    """The rewards of replies at their last tokens, 0 at all others."""
    values = [0.0] * len(row.response_ids)
    for (_, end), reward in zip(row.replies, rewards, strict=True):
        values[end - 1] += reward
    return values


def _row(result: EpisodeResult, prompts: Batch, index: int) -> TranscriptRow:
    """The row of an episode without what followed its last reply; masked if it failed or has no reply.

    It has no token if it was withdrawn before its first reply: its prompt is not trained on.
    """
    row = None if result.transcript is None else result.transcript.as_row()
    if row is None or not row.replies:
        prompt = prompts.tokens("prompt_ids").row(index).tolist()
        if result.limit == DEADLINE:
            return TranscriptRow(prompt)
        return TranscriptRow(prompt, prompt[-1:], [0], [0.0])
    return replace(row, mask=[0] * len(row.mask)) if result.ended is None else row


def _version_runs(
    rows: Sequence[TranscriptRow], results: Sequence[EpisodeResult], version: int | None
) -> list[list[tuple[int, int]]]:
    """The column `version_runs`; tokens that the model did not sample belong to the run before them."""
    runs = [_runs_of(row) for row in rows]
    if version is None and not all(runs):
        failed = sum(result.ended is None for result in results)
        raise EpisodeError(
            f"None of the {len(results)} episodes of this rank has a reply of the model ({failed} of them failed):"
            " there is nothing to train on.",
            remedy="The log has the reasons of the first failures. An episode that does not fail must ask the model at"
            " least once before it ends.",
        )
    others = [] if version is None else [(version, 0)]
    return [own or others for own in runs]


def _runs_of(row: TranscriptRow) -> list[tuple[int, int]]:
    """For each run of sampled tokens with weights of one version: the version, and the first token in the response."""
    runs: list[tuple[int, int]] = []
    for first, last in row.replies:
        for token in range(first, last):
            if not runs or runs[-1][0] != row.versions[token]:
                runs.append((row.versions[token], token if runs else 0))
    return runs


def _returns(
    order: Sequence[EpisodeResult], rows: Sequence[TranscriptRow], uids: list[int], gamma: float
) -> list[float]:
    """The return of each episode; a failed one gets the mean of its group's, or 0 if all of them failed."""
    own = [
        None if result.ended is None else _episode_return(result.ended.rewards, len(row.replies), gamma)
        for result, row in zip(order, rows, strict=True)
    ]
    known: dict[int, list[float]] = {uid: [] for uid in uids}
    for uid, value in zip(uids, own, strict=True):
        if value is not None:
            known[uid].append(value)
    return [
        math.fsum(known[uid]) / max(1, len(known[uid])) if value is None else value
        for uid, value in zip(uids, own, strict=True)
    ]


def _episode_return(rewards: Sequence[float], num_replies: int, gamma: float) -> float:
    """The return before the first reply; what comes after the last reply counts as its reward (`reply_rewards`)."""
    last = max(0, num_replies - 1)
    return math.fsum(gamma ** min(reply, last) * reward for reply, reward in enumerate(rewards))


def _first_prompt(result: EpisodeResult, prompts: Batch, index: int) -> object:
    """The prompt of the data, or what the episode showed instead: a text if the prompt of the data is one."""
    given = prompts.object("prompt")[index]
    if result.transcript is None:
        return given
    first = result.transcript.opening
    return "".join(str(message["content"]) for message in first) if isinstance(given, str) else first
