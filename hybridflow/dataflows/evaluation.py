"""Held-out prompts, answered and judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Evaluates(Protocol):
    """How the loop looks at a model between steps."""

    def run(self) -> tuple[Metrics, list[Sample]]:
        """Metrics, and samples to show."""
        ...


@dataclass(frozen=True)
class HeldOut:
    """What a dataflow that learns from data says of rows it does not learn from."""

    dataflow: Dataflow
    batch: Batch

    def run(self) -> tuple[Metrics, list[Sample]]:
        """The dataflow's own metrics."""
        owner = f"{type(self.dataflow).__name__}.evaluate"
        return measured(self.dataflow.evaluate(self.batch) or {}, owner=owner), []


@dataclass(frozen=True)
class Evaluation:
    """Answers all of `prompts` and scores them; `decode` turns tokens to text for the sample table."""

    rollout: Sampler
    reward: Scorer
    prompts: Batch
    samples_per_prompt: int
    decode: Decode
    sample_rows: int
    what: str = "reward"
    """`acc` where a score of 1 means a right answer, else `reward`."""

    def run(self) -> tuple[Metrics, list[Sample]]:
        """`val-core/<source>/<what>/mean@N`, and the first samples.

        For several samples also the best's `pass@N`; for several functions `val-aux/<source>/<function>/mean` of each.
        """
        batch = self.rollout.generate(self.prompts.repeat(self.samples_per_prompt), purpose="eval")
        batch = self.reward.score(batch)
        scores = batch.row("scores")
        sources = [source for source in self.prompts.object("data_source") for _ in range(self.samples_per_prompt)]
        metrics = {}
        parts = [column for column in batch.columns if column.startswith("rewards/")]
        for source in dict.fromkeys(sources):
            rows = torch.tensor([name == source for name in sources])
            chosen = scores[rows]
            for part in parts if len(parts) > 1 else []:
                metrics |= _part(f"val-aux/{source}/{part.removeprefix('rewards/')}", batch.row(part)[rows])
            name, samples = f"val-core/{source}/{self.what}", self.samples_per_prompt
            metrics[f"{name}/mean@{samples}"] = mean(float(chosen.mean()), len(chosen))
            if samples > 1:
                best = chosen.view(-1, samples).amax(1)
                metrics[f"{name}/pass@{samples}"] = mean(float(best.mean()), len(best))
        first = batch.take(range(min(self.sample_rows, len(batch)))).fetch()
        return metrics, samples_of(first, self.decode, split="eval")


def _part(name: str, scores: Tensor) -> Metrics:
    """The mean of one function's scores, of the responses that it scored."""
    scored = scores[~scores.isnan()]
    return {f"{name}/mean": mean(float(scored.mean()), len(scored))} if len(scored) else {}


@dataclass(frozen=True)
class Evaluations:
    """Several looks at one model."""

    looks: Sequence[Evaluates]

    def run(self) -> tuple[Metrics, list[Sample]]:
        """What all of them say."""
        metrics: Metrics = {}
        samples: list[Sample] = []
        for look in self.looks:
            found, shown = look.run()
            metrics |= found
            samples += shown
        return metrics, samples


def samples_of(batch: Batch, decode: Decode, *, split: str) -> list[Sample]:
    """The rows of a batch as text; of a worked solution, the final answer."""
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
