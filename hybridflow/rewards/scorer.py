"""RewardScorer: applies the reward functions of a run to samples, and adds up their weighted scores."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.reward import LARGEST_SCORE, Reward
from hybridflow.errors import STRICT, ConfigError, Problems, RewardError
from hybridflow.observability.activity import ACTIVITY, FOREVER
from hybridflow.observability.formatting import counted
from hybridflow.observability.metrics import Metrics, mean, total
from hybridflow.rewards.dialects import FILTER_SCORES, as_list
from hybridflow.rewards.interface import Failure, Outcome, Prompt, Samples
from hybridflow.rewards.remote import RemoteReward
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.choice import make_runner
from hybridflow.rewards.runners.serial import SerialRunner

logger = logging.getLogger(__name__)

_LEAST_WAIT_SECONDS = 120.0
"""A function may at least wait so long in a call, whatever `reward.timeout_seconds` is."""


@dataclass(frozen=True)
class Scored:
    """The scores of B samples.

    `scores` [B] float32 are the weighted sums. `columns` holds the scores [B] of each function by label, NaN where it
    returned none; `extras` holds other columns that functions reported. `filter_scores` [B] are the scores by which
    dynamic filtering compares groups, None if no function reports such scores.
    """

    scores: Tensor
    columns: dict[str, Tensor]
    metrics: Metrics
    failures: list[Failure] = field(default_factory=list)
    extras: dict[str, list] = field(default_factory=dict)
    filter_scores: Tensor | None = None


class RewardScorer:
    """Scores samples with the functions of `reward.functions`.

    A sample fails if a function raises for it or returns no usable number. Failures count against
    `reward.error_budget` for the life of the scorer; beyond it, scoring raises `RewardError`. Within it, a failed
    sample has no score from that function, and 0 if no other function scores it.

        scorer = RewardScorer(config.reward)
        scorer.check_columns(table.columns)
        scored = scorer.score(prompts, completions, {"answer": answers})
    """

    def __init__(self, config: Reward, problems: Problems = STRICT) -> None:
        self.functions = resolve_functions(config, problems)
        self._weights = list(config.weights) or [1.0] * len(config.functions)
        assert len(self._weights) == len(config.functions), f"weights {self._weights} for {config.functions}"
        self._budget = config.error_budget
        self._runner = make_runner(config, self.functions)
        self._is_alone = config.model.path is None
        self._num_failures = 0
        self._timeout_seconds = config.timeout_seconds

    @property
    def names(self) -> list[str]:
        """The label of each function, which names its metrics and column."""
        return [function.label for function in self.functions]

    def check_columns(
        self, columns: Collection[str], problems: Problems = STRICT, *, data: str = "the data", remedy: str = ""
    ) -> None:
        """Adds a `ConfigError` for each column that a function requires and the data, named `data`, does not have."""
        for function in self.functions:
            for name in sorted(function.required_columns - set(columns)):
                error = ConfigError(
                    f"The reward function '{function.setting}' needs the column '{name}'; {data} does not have it.",
                    remedy=f"{did_you_mean(name, columns)}The columns are: {', '.join(columns)}. Rename the parameter "
                    f"or the column, or give the parameter a default.{remedy}",
                )
                problems.add(error)

    def check_servers(self, problems: Problems = STRICT) -> None:
        """Adds a `ConfigError` for each reward server of which no address can be reached."""
        for function in self.functions:
            if isinstance(function.function, RemoteReward):
                with problems.caught():
                    function.function.check_reachable()

    def start(self) -> None:
        """Starts processes in the background; otherwise the first `score` starts them."""
        self._runner.start()

    def close(self) -> None:
        """Ends the processes; a later `score` starts new ones."""
        self._runner.close()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: Mapping[str, list],
        completion_ids: Sequence[Sequence[int] | Tensor] | None = None,
    ) -> Scored:
        """Scores B samples. `columns` are those of the data, one value per sample; `completion_ids` the token ids."""
        wanted = any("completion_ids" in function.parameters.named for function in self.functions)
        ids = [as_list(row) for row in completion_ids] if wanted and completion_ids is not None else None
        samples = Samples(list(prompts), list(completions), columns, ids)
        assert len(prompts) == len(samples), f"{len(prompts)} prompts for {len(samples)} completions"
        with ACTIVITY.waiting(self._may_wait(samples)):
            outcomes = self._runner.run(self.functions, samples, allowed_failures=self._budget - self._num_failures)
        table = as_columns([outcome.scores for outcome in outcomes])
        scores, unscored = weighted_sum(table, self._weights)
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        self._check_budget(failures, len(samples))  # beyond it, runners leave out samples, which are then without score
        failures += self._unscored(samples, unscored, failures) + self._out_of_range(samples, scores)
        self._num_failures = self._check_budget(failures, len(samples))
        for failure in failures:
            logger.warning("reward failures=%d reward.error_budget=%d: %s", self._num_failures, self._budget, failure)
        return Scored(
            scores=torch.where(scores.abs() <= LARGEST_SCORE, scores, 0.0),
            columns=dict(zip(self.names, table, strict=True)),
            metrics=self._metrics(outcomes),
            failures=failures,
            extras={name: values for outcome in outcomes for name, values in outcome.extras.items()},
            filter_scores=self._filter_scores(table, outcomes),
        )

    def _may_wait(self, samples: Samples) -> float:
        """How long the functions may wait without using the processor; others than plain functions have own limits."""
        has_limits = not isinstance(self._runner, SerialRunner)
        if has_limits or any(isinstance(function.function, RemoteReward) for function in self.functions):
            return FOREVER
        return max(_LEAST_WAIT_SECONDS, self._timeout_seconds * len(samples))

    def _filter_scores(self, table: Tensor, outcomes: Sequence[Outcome]) -> Tensor | None:
        """None, or a number per sample; which of the two depends on the functions alone, never on the samples."""
        if not any(function.dialect.has_filter_scores for function in self.functions):
            return None
        reported = [
            outcome.extras.get(FILTER_SCORES) if function.dialect.has_filter_scores else None
            for function, outcome in zip(self.functions, outcomes, strict=True)
        ]
        rows = [
            column if values is None else torch.tensor([float(v) if isinstance(v, Real) else math.nan for v in values])
            for column, values in zip(table, reported, strict=True)
        ]
        found = torch.stack(rows).to(table.dtype)
        return weighted_sum(torch.where(found.isfinite(), found, table), self._weights)[0]

    def _unscored(self, samples: Samples, unscored: Tensor, failures: Sequence[Failure]) -> list[Failure]:
        """Failures of samples for which every function returned None, unless a reward model scores them too."""
        if not self._is_alone:
            return []
        failed = {failure.index for failure in failures}
        reason = "no function scored it: each returned None."
        missing = [index for index in torch.nonzero(unscored).flatten().tolist() if index not in failed]
        return self._of_all_functions(samples, missing, reason)

    def _out_of_range(self, samples: Samples, scores: Tensor) -> list[Failure]:
        """Failures of samples whose weighted sum is out of range, although their scores are not."""
        found = torch.nonzero(~(scores.abs() <= LARGEST_SCORE)).flatten().tolist()
        reason = f"the weighted sum of its scores is not between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
        return self._of_all_functions(samples, found, reason)

    def _of_all_functions(self, samples: Samples, indices: Sequence[int], reason: str) -> list[Failure]:
        names = ", ".join(function.setting for function in self.functions)
        return [Failure(names, index, reason, samples.prompts[index], samples.completions[index]) for index in indices]

    def _check_budget(self, failures: Sequence[Failure], num_samples: int) -> int:
        """Failed samples so far, with those of a batch; raises an error beyond the budget."""
        failed = len({failure.index for failure in failures})
        so_far = self._num_failures + failed
        if so_far > self._budget:
            raise RewardError(
                f"The reward function {failures[0]}\n"
                f"This rank has failed to score {counted(so_far, 'sample')} so far ({failed} of the {num_samples} in"
                f" this batch); reward.error_budget={self._budget} allows {self._budget} per rank.",
                remedy="Fix the function or the server, or raise reward.error_budget. If a sample cannot be scored,"
                " return None and let another function score it.",
            )
        return so_far

    def _metrics(self, outcomes: Sequence[Outcome]) -> Metrics:
        metrics: Metrics = {}
        for name, outcome in zip(self.names, outcomes, strict=True):
            found = [score for score in outcome.scores if score is not None]
            if found:
                metrics[f"rewards/{name}/mean"] = mean(math.fsum(found) / len(found), len(found))
            if self._budget:
                metrics[f"rewards/{name}/failures"] = total(len(outcome.failures))
            metrics |= {f"rewards/{name}/{key}": measure for key, measure in outcome.metrics.items()}
        return metrics


def as_columns(scores: Sequence[Sequence[float | None]]) -> Float[Tensor, "F B"]:
    """Scores of F functions for B samples, with NaN for None."""
    rows = [[float("nan") if score is None else score for score in column] for column in scores]
    return torch.tensor(rows, dtype=torch.float32)


def weighted_sum(
    columns: Float[Tensor, "F B"], weights: Sequence[float]
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """sum_f weights[f] columns[f], where NaN (not scored) adds nothing; and which samples no function scored."""
    weighted = columns * torch.tensor(weights, dtype=columns.dtype)[:, None]
    return weighted.nansum(0), columns.isnan().all(0)
