"""Evaluation on held-out data."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Sampler, Scorer
from hybridflow.observability.metrics import Metrics, mean, measured
from hybridflow.observability.samples import Sample
from hybridflow.rewards.answers import expected_answer

Decode = Callable[[Ragged], list[str]]
"""Token ids to texts, one per row."""


Evaluate = Callable[[], tuple[Metrics, list[Sample]]]
"""An evaluation between steps: metrics, and samples to show."""


def evaluate_held_out(dataflow: Dataflow, batch: Batch) -> tuple[Metrics, list[Sample]]:
    """The metrics of held-out rows by the dataflow's `evaluate`, and no samples."""
    return measured(dataflow.evaluate(batch) or {}, owner=f"{type(dataflow).__name__}.evaluate"), []


def evaluate_responses(
    rollout: Sampler,
    reward: Scorer,
    prompts: Batch,
    *,
    samples_per_prompt: int,
    decode: Decode,
    sample_rows: int,
    what: str = "reward",
) -> tuple[Metrics, list[Sample]]:
    """Samples responses to held-out prompts and scores them. Returns metrics and the first `sample_rows` samples.

    The metrics are `val-core/<source>/<what>/mean@N`; with several samples, also `pass@N` of the best; with several
    functions, `val-aux/<source>/<function>/mean`. `what` is `acc` if a score of 1 means a correct answer, otherwise
    `reward`. `decode` converts tokens to text for the sample table.
    """
    batch = rollout.generate(prompts.repeat(samples_per_prompt), purpose="eval")
    batch = reward.score(batch)
    scores = batch.row("scores")
    sources = [source for source in prompts.object("data_source") for _ in range(samples_per_prompt)]
    metrics = {}
    parts = [column for column in batch.columns if column.startswith("rewards/")]
    for source in dict.fromkeys(sources):
        rows = torch.tensor([name == source for name in sources])
        chosen = scores[rows]
        for part in parts if len(parts) > 1 else []:
            metrics |= _part(f"val-aux/{source}/{part.removeprefix('rewards/')}", batch.row(part)[rows])
        name, samples = f"val-core/{source}/{what}", samples_per_prompt
        metrics[f"{name}/mean@{samples}"] = mean(float(chosen.mean()), len(chosen))
        if samples > 1:
            best = chosen.view(-1, samples).amax(1)
            metrics[f"{name}/pass@{samples}"] = mean(float(best.mean()), len(best))
    first = batch.take(range(min(sample_rows, len(batch)))).fetch()
    return metrics, samples_of(first, decode, split="eval")


def _part(name: str, scores: Tensor) -> Metrics:
    """The mean score of a function over the responses that it scored."""
    scored = scores[~scores.isnan()]
    return {f"{name}/mean": mean(float(scored.mean()), len(scored))} if len(scored) else {}


def samples_of(batch: Batch, decode: Decode, *, split: str) -> list[Sample]:
    """The rows of a batch as text; answers are reduced to their final value."""
    responses = decode(batch.tokens("response_ids"))
    prompts = decode(batch.tokens("prompt_ids"))
    answers = batch.object("answer") if "answer" in batch else [None] * len(batch)
    return [
        Sample(
            prompt=prompt,
            response=response,
            answer=None if answer is None else expected_answer(answer),
            score=score,
            uid=uid,
            split="eval" if split == "eval" else "train",
        )
        for prompt, response, answer, score, uid in zip(
            prompts, responses, answers, batch.row("scores").tolist(), batch.row("uid").tolist(), strict=True
        )
    ]
