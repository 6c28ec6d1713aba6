"""Stage names, batch metrics, and steps that several dataflows share."""

from collections.abc import Callable, Mapping, Sequence

import torch

from hybridflow.algorithms.advantages.group_relative import fraction_without_spread
from hybridflow.batch import Batch
from hybridflow.batch.accounting import distinct
from hybridflow.batch.episode_counts import COUNTED, LIMITED, NUMBER, WITH_NUMBER
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import Future, wait
from hybridflow.observability.metrics import Measure, Metrics, mean, merge, summary, total

_STAGE_OF_METHOD = {
    "generate": "gen",
    "advance": "gen",
    "advantages": "adv",
    "combine_advantages": "adv",
    "evaluate": "testing",
    "publish_weights": "update_weights",
    "reference_logprobs": "ref",
    "save": "save_checkpoint",
    "saved": "save_checkpoint",
}

_HELD_OUT = {"rewards/accuracies": "acc", "train/loss": "loss", "rewards/margins": "margin"}
"""Metrics of `evaluate`, and their names for held-out rows."""


def stage_name(role: str, method: str) -> str:
    """The stage of a call in `timing_s/<stage>`, as verl names it."""
    if method == "logprobs":
        return "old_log_prob" if role == "actor" else "ref"
    if method in ("update", "supervised_step", "preference_step"):
        return f"update_{role}"
    if method == "score":
        return "reward" if role in ("reward", "reward_model") else role
    if method == "values":
        return "values" if role == "critic" else f"{role}_values"
    return _STAGE_OF_METHOD.get(method, f"{role}_{method}")


def batch_metrics(batch: BatchRef) -> Metrics:
    """Metrics of scores and lengths, from row columns on the driver."""
    prompts, responses = batch.tokens_of("prompt_ids"), batch.tokens_of("response_ids")
    scores, uids = batch.row("scores"), batch.row("uid")
    counts = _has_score(batch)
    metrics = summary("critic/score", scores[counts].tolist())
    metrics |= summary("response_length", responses.tolist()) | summary("prompt_length", prompts.tolist())
    if "turns" in batch.columns:
        metrics |= summary("num_turns", batch.row("turns").tolist())
        metrics |= episode_metrics(batch.metrics_by_shard(COUNTED))
        metrics["environment/failed_fraction"] = mean(float(batch.row("failed").float().mean()), len(responses))
    metrics["response_length/clip_ratio"] = mean(float(batch.row("truncated").float().mean()), len(responses))
    if len(distinct(uids)[0]) < len(uids):
        metrics["frac_reward_zero_std"] = mean(float(fraction_without_spread(scores, uids)), len(uids))
    for name in batch.columns:
        if name.startswith("rewards/"):
            column = batch.row(name)[counts]
            if (measure := scored_mean(column)).weight:
                metrics[f"{name}/mean"] = measure
            if measure.weight < len(column):
                metrics[f"{name}/not_scored"] = total(len(column) - measure.weight)
    for name, parts in batch.metrics_by_shard("rewards/").items():
        is_count = name.endswith("/failures")
        metrics |= merge([{name: total(value) if is_count else mean(value, rows)} for value, rows in parts])
    return metrics


def scored_mean(values: torch.Tensor) -> Measure:
    """The mean of the values that are not NaN; NaN, with weight 0, if there are none."""
    found = values[~values.isnan()]
    return mean(float(found.mean()), len(found))


def _has_score(batch: BatchRef) -> torch.Tensor:
    """Which rows [B] have a score of their own: all, except failed episodes."""
    return ~batch.row("failed") if "failed" in batch.columns else torch.ones(len(batch), dtype=torch.bool)


def episode_metrics(counted: Mapping[str, Sequence[tuple[float, int]]]) -> Metrics:
    """Metrics of environments from what they counted (`batch.episode_counts`), each with its number of episodes.

    `environment/info/<name>` is the mean over the episodes whose environment gave a number of this name, and
    `environment/<limit>_fraction` the fraction of episodes that ended at a limit.
    """
    sums = {name: sum(value for value, _ in parts) for name, parts in counted.items()}
    metrics: Metrics = {}
    for name, value in sums.items():
        if name.startswith(LIMITED):
            episodes = sum(rows for _, rows in counted[name])
            metrics[f"{COUNTED}{name.removeprefix(LIMITED)}_fraction"] = mean(value / max(1, episodes), episodes)
        elif name.startswith(WITH_NUMBER):
            number = f"{NUMBER}{name.removeprefix(WITH_NUMBER)}"
            metrics[number] = mean(sums[number] / value, value)
        elif not name.startswith(NUMBER):
            metrics[name] = total(value)
    return metrics


def evaluated_by_source(held_out: Batch, evaluate: Callable[[Batch], Future[Metrics]]) -> Metrics:
    """`val-core/<source>/{acc,loss,margin}`: metrics of held-out rows, per data source."""
    sources, metrics = held_out.object("data_source"), {}
    for source in dict.fromkeys(sources):
        measures = wait(evaluate(held_out.select([row for row, name in enumerate(sources) if name == source])))
        metrics |= {f"val-core/{source}/{name}": measures[key] for key, name in _HELD_OUT.items() if key in measures}
    return metrics
