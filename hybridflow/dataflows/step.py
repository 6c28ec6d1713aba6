"""The size and metrics of a training step, the account of its prompts, and the place of an error in a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.accounting import check_accounted, check_unique
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.run import Run
from hybridflow.dataflows.stages import stage_name
from hybridflow.errors import HybridflowError, RewardError, explained
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.performance import call_metrics, throughput
from hybridflow.observability.trace import STEP


def size_of(dataflow: Dataflow, prompts: Batch) -> tuple[int, int]:
    """Tokens and sequences of a step; KTO's mismatched responses are not counted."""
    batch = dataflow.last_batch
    if batch is None:
        learned = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
        tokens = {name: len(prompts.tokens(name).values) for name in learned if name in prompts}
        texts = 2 if "chosen_ids" in tokens else 1  # a pair is two texts with one prompt
        return sum(tokens.values()) + (texts - 1) * tokens.get("prompt_ids", 0), texts * len(prompts)
    return int(batch.lengths.sum()), len(batch)


def is_due(every: int, step: int, *, is_last: bool) -> bool:
    """Whether what is done every so many steps (0: never), and after the last one, is done after this step."""
    return every > 0 and (step % every == 0 or is_last)


def step_metrics(run: Run, step: int, prompts: Batch, *, started: float, seconds: float) -> Metrics:
    """The metrics of the calls of a step that has ended, and its throughput. Adds the calls' seconds to the timers.

    `started` is its beginning on the clock of `time.perf_counter`.
    """
    section = run.trace.record(STEP, step, started, seconds)
    for (role, method), total in section.totals().items():
        run.timers.add(stage_name(role, method), total.seconds)
    tokens, samples = size_of(run.dataflow, prompts)
    return call_metrics(section) | throughput(tokens, seconds, samples, devices=run.num_devices)


def check_observed(prompts: Batch, observed: Sequence[Tensor], samples_per_prompt: int, *, is_all: bool) -> None:
    """Raises `BatchError` if a prompt of the step was lost or duplicated on the way to `Dataflow.observe`.

    `observed` are the uids of the rows that were passed to it. `is_all`: the step drew no further prompts, so it cannot
    have others.
    """
    entered, left = prompts.row("uid"), torch.cat(list(observed))
    check_unique(entered)
    left = left if is_all else left[torch.isin(left, entered)]
    check_accounted(entered, left, samples_per_prompt=samples_per_prompt, stage="step")


@contextmanager
def failing_in(what: str) -> Iterator[None]:
    """Prefixes a reward's error with where it failed: functions are called in training and in evaluations."""
    try:
        yield
    except HybridflowError as error:
        if isinstance(cause := explained(error), RewardError):
            cause.message = f"In {what}: {cause.message}"
        raise
