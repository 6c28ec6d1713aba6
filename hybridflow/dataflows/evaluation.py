"""Evaluation on held-out data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.data.conversations import Prompt
from hybridflow.data.loader import Rows
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Scorer
from hybridflow.dataflows.stages import scored_mean
from hybridflow.observability.metrics import Metrics, measured
from hybridflow.observability.redaction import redacted_text
from hybridflow.observability.samples import Sample, Turn
from hybridflow.rewards.answers import expected_answer

Decode = Callable[[Ragged], list[str]]
"""Token ids to texts, one per row."""


Evaluate = Callable[[], tuple[Metrics, list[Sample]]]
"""An evaluation between steps: metrics, and samples to show."""


OnPart = Callable[[int, int], None]
"""Called with the number of rows that are evaluated so far, and of all."""


Keep = Callable[[list[Sample]], None]
"""Called with the samples of a part."""


@dataclass(frozen=True)
class Parts:
    """Rows in parts of about the same size, to be evaluated one after the other; `on_part` is called before each.

    Parts are made when they are needed. Rows without `uid` get their positions among those that are used.
    """

    rows: Rows
    count: int
    on_part: OnPart
    limit: int | None = None
    """Only so many rows are used."""

    def __iter__(self) -> Iterator[Batch]:
        total, used = min(len(self.rows), self.limit or len(self.rows)), 0
        for part in range(self.count):
            start, stop = (total // self.count * i + min(i, total % self.count) for i in (part, part + 1))
            self.on_part(start, total)
            batch = self.rows.select(torch.arange(start, stop))
            if "uid" not in batch:
                batch = batch.with_columns(rows={"uid": torch.arange(used, used + len(batch))})
            used += len(batch)
            yield batch


def evaluate_held_out(
    dataflow: Dataflow, batch: Batch, on_part: OnPart = lambda done, total: None
) -> tuple[Metrics, list[Sample]]:
    """The metrics of held-out rows by the dataflow's `evaluate`, and no samples."""
    on_part(0, len(batch))
    return measured(dataflow.evaluate(batch) or {}, owner=f"{type(dataflow).__name__}.evaluate"), []


def evaluate_responses(
    rollout: Sampler,
    reward: Scorer | None,
    parts: Iterable[Batch],
    *,
    samples_per_prompt: int,
    decode: Decode,
    sample_rows: int | Keep,
    what: str = "reward",
    with_ids: bool = False,
) -> tuple[Metrics, list[Sample]]:
    """Samples responses to held-out prompts, one part after the other, and scores them.

    Returns metrics and the first `sample_rows` samples; neither depends on how the prompts are divided. If
    `sample_rows` is a function, it gets all samples, part by part, so that memory does not grow with their number.

    The metrics are `val-core/<source>/<what>/mean@N`; with several samples, also `pass@N` of the best; with several
    functions, `val-aux/<source>/<function>/mean`; with an environment, `val-aux/<source>/failed_fraction`, the fraction
    of its episodes that failed, which have no score. `what` is `acc` if a score of 1 means a correct answer, otherwise
    `reward`. Without a reward there are samples only. `decode` converts tokens to text for the sample table, which
    also has token ids if it is `with_ids`.
    """
    columns: dict[str, list[Tensor]] = {}
    sources: list[str] = []
    samples: list[Sample] = []
    for prompts in parts:
        batch = rollout.generate(prompts.repeat(samples_per_prompt), purpose="eval")
        answered = (batch if reward is None else reward.score(batch)).result()  # waits
        sources += [source for source in prompts.object("data_source") for _ in range(samples_per_prompt)]
        wanted = min(sample_rows - len(samples), len(answered)) if isinstance(sample_rows, int) else len(answered)
        if wanted:
            shown = samples_of(answered.take(range(wanted)).fetch(), decode, split="eval", with_ids=with_ids)
            (samples.extend if isinstance(sample_rows, int) else sample_rows)(shown)
        found = {
            name: answered.row(name) for name in answered.columns if name == "scores" or name.startswith("rewards/")
        }
        if "failed" in answered.columns:
            failed = answered.row("failed")
            found = {name: column.masked_fill(failed, math.nan) for name, column in found.items()}
            found["failed"] = failed.float()
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    if reward is None:
        return {}, samples
    return _scores(
        {name: torch.cat(parts) for name, parts in columns.items()}, sources, samples_per_prompt, what
    ), samples


def _scores(found: Mapping[str, Tensor], sources: Sequence[str], samples_per_prompt: int, what: str) -> Metrics:
    scores = found["scores"]
    metrics = {}
    parts = [name for name in found if name.startswith("rewards/")]
    for source in dict.fromkeys(sources):
        rows = torch.tensor([name == source for name in sources])
        chosen = scores[rows]
        for part in parts if len(parts) > 1 else []:
            if (measure := scored_mean(found[part][rows])).weight:
                metrics[f"val-aux/{source}/{part.removeprefix('rewards/')}/mean"] = measure
        if "failed" in found:
            metrics[f"val-aux/{source}/failed_fraction"] = scored_mean(found["failed"][rows])
        name, samples = f"val-core/{source}/{what}", samples_per_prompt
        metrics[f"{name}/mean@{samples}"] = scored_mean(chosen)
        if samples > 1:
            best = chosen.nan_to_num(-math.inf).view(-1, samples).amax(1)
            metrics[f"{name}/pass@{samples}"] = scored_mean(best.masked_fill(best.isinf(), math.nan))
    return metrics


def samples_of(batch: Batch, decode: Decode, *, split: str, with_ids: bool = False) -> list[Sample]:
    """The rows of a batch as text, also `with_ids` of the responses; answers are reduced to their final value.

    Episodes also have their turns and, `with_ids`, which of the tokens were sampled and where forks begin.
    """
    ids = batch.tokens("response_ids")
    responses, prompts = decode(ids), decode(batch.tokens("prompt_ids"))
    unknown = [None] * len(batch)
    answers = batch.object("answer") if "answer" in batch else unknown
    sources = batch.object("data_source") if "data_source" in batch else unknown
    asked = batch.object("prompt") if "prompt" in batch else [""] * len(batch)
    scores = batch.row("scores").tolist() if "scores" in batch else [math.nan] * len(batch)
    parts = [column for column in batch.columns if column.startswith("rewards/")]
    parts = {name.removeprefix("rewards/"): batch.row(name).tolist() for name in (parts if len(parts) > 1 else [])}
    rows = zip(
        prompts, responses, answers, scores, batch.row("uid").tolist(), sources, ids.rows(),
        batch.row("truncated").tolist(), asked, strict=True,
    )  # fmt: skip
    samples = [
        Sample(
            prompt=prompt,
            response=response,
            answer=None if answer is None else expected_answer(answer),
            score=score,
            uid=uid,
            split="eval" if split == "eval" else "train",
            question=_last_question(messages),
            source=source,
            tokens=len(tokens),
            is_cut_off=bool(cut),
            rewards={name: values[index] for name, values in parts.items()},
            response_ids=tokens.tolist() if with_ids else None,
        )
        for index, (prompt, response, answer, score, uid, source, tokens, cut, messages) in enumerate(rows)
    ]
    return _episodes(samples, batch, with_ids=with_ids) if "messages" in batch else samples


def _episodes(samples: Sequence[Sample], batch: Batch, *, with_ids: bool) -> list[Sample]:
    """The samples with what only episodes have; one that failed has no score."""
    masks, forks = (batch.tokens(name).rows() for name in ("response_mask", "fork_starts"))
    return [
        replace(
            sample,
            turns=turns,
            score=math.nan if failed else sample.score,
            is_failed=failed or None,
            response_mask=mask.int().tolist() if with_ids else None,
            fork_starts=starts.tolist() if with_ids else None,
            stderr=redacted_text(errors) or None,
        )
        for sample, turns, failed, mask, starts, errors in zip(
            samples, _turns(batch), batch.row("failed").tolist(), masks, forks, batch.object("stderr"), strict=True
        )
    ]


def _turns(batch: Batch) -> list[list[Turn]]:
    """The turns of each episode, from the first reply on, with the reward after each reply."""
    found = []
    columns = (batch.object(name) for name in ("messages", "reply_rewards", "fork_places"))
    for messages, rewards, forks in zip(*columns, strict=True):
        reward_of = dict(rewards)
        found.append(
            [
                Turn(str(message["role"]), str(message["content"]), reward_of.get(place), place in forks)
                for place, message in enumerate(messages)
                if place >= min(reward_of, default=len(messages))
            ]
        )
    return found


def _last_question(prompt: Prompt) -> str | None:
    """The user's last turn of a conversation."""
    turns = [] if isinstance(prompt, str) else [turn["content"] for turn in prompt if turn["role"] == "user"]
    return str(turns[-1]) if turns else None
