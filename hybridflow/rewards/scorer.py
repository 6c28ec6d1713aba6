"""RewardScorer: the functions of a run, applied to samples, weighted and added up."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.reward import LARGEST_SCORE, Reward
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observability.metrics import Metrics, mean, total
from hybridflow.rewards.combine import as_columns, preferred, weighted_sum
from hybridflow.rewards.dialects import FILTER_SCORES, as_list
from hybridflow.rewards.interface import Failure, Outcome, Prompt, Samples
from hybridflow.rewards.remote import RemoteReward
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.choice import make_runner
from hybridflow.rewards.runners.interface import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """What became of B samples.

    `scores` [B] float32 are the weighted sums. `columns` holds each function's own scores [B] by label, NaN where it
    did not score; `extras` what functions reported for each sample beside them. `filter_scores` [B] are the weighted
    sums of what the functions answer for groups to be judged by, where one can say more of this than its score.
    """

    scores: Tensor
    columns: dict[str, Tensor]
    metrics: Metrics
    failures: list[Failure] = field(default_factory=list)
    extras: dict[str, list] = field(default_factory=dict)
    filter_scores: Tensor | None = None


class RewardScorer:
    """Scores samples with the functions of `reward.functions`.

    A failing sample (the function raised for it, or answered with no finite number) counts against
    `reward.error_budget`, which holds for the life of the scorer; past it, scoring raises `RewardError`. Within it,
    that function leaves the sample unscored; a sample left without any score gets 0.

        scorer = RewardScorer(config.reward)
        scorer.check_columns(table.columns)
        scored = scorer.score(prompts, completions, {"answer": answers})
    """

    def __init__(self, config: Reward, *, runner: Runner | None = None) -> None:
        self.functions = resolve_functions(config)
        self._weights = _checked_weights(config)
        self._budget = config.error_budget
        self._runner = runner or make_runner(config, self.functions)
        self._is_alone = config.model.path is None
        self._num_failures = 0

    @property
    def names(self) -> list[str]:
        """Label of each function, as metrics and columns carry it."""
        return [function.label for function in self.functions]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises `ConfigError` when a function must be given a column that the data does not have."""
        for function in self.functions:
            for name in sorted(function.required_columns - set(columns)):
                raise ConfigError(
                    f"The reward function '{function.setting}' needs the column '{name}'; the data does not have it.",
                    remedy=f"{did_you_mean(name, columns)}The columns are: {', '.join(columns)}. Rename the parameter "
                    "or the column, or give the parameter a default.",
                )

    def check_servers(self) -> None:
        """Raises `ConfigError` where a function is a server's and none of its addresses can be reached."""
        for function in self.functions:
            if isinstance(function.function, RemoteReward):
                function.function.check_reachable()

    def start(self) -> None:
        """Begins what takes time to begin, such as processes; `score` does it too."""
        self._runner.start()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: Mapping[str, list],
        completion_ids: Sequence[Sequence[int] | Tensor] | None = None,
    ) -> Scored:
        """Scores of B samples; `columns` are the data's, one value per sample. Ids reach functions that name them."""
        wanted = any("completion_ids" in function.parameters.named for function in self.functions)
        ids = [as_list(row) for row in completion_ids] if wanted and completion_ids is not None else None
        samples = Samples(list(prompts), list(completions), columns, ids)
        assert len(prompts) == len(samples), f"{len(prompts)} prompts for {len(samples)} completions"
        outcomes = self._runner.run(self.functions, samples, allowed_failures=self._budget - self._num_failures)
        table = as_columns([outcome.scores for outcome in outcomes])
        scores, unscored = weighted_sum(table, self._weights)
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        self._spend(failures, len(samples))
        left_out = self._left_out(samples, unscored, failures) + self._beyond(samples, scores)
        self._spend(left_out, len(samples))
        return Scored(
            scores=torch.where(scores.abs() <= LARGEST_SCORE, scores, 0.0),
            columns=dict(zip(self.names, table, strict=True)),
            metrics=self._metrics(outcomes),
            failures=failures + left_out,
            extras={name: values for outcome in outcomes for name, values in outcome.extras.items()},
            filter_scores=self._filter_scores(table, outcomes),
        )

    def _filter_scores(self, table: Tensor, outcomes: Sequence[Outcome]) -> Tensor | None:
        """None, or numbers for every sample: whatever the samples, the same functions have the same columns."""
        if not any(function.dialect.has_filter_scores for function in self.functions):
            return None
        filter_scores = [
            outcome.extras.get(FILTER_SCORES) if function.dialect.has_filter_scores else None
            for function, outcome in zip(self.functions, outcomes, strict=True)
        ]
        return weighted_sum(preferred(table, filter_scores), self._weights)[0]

    def _left_out(self, samples: Samples, unscored: Tensor, failures: Sequence[Failure]) -> list[Failure]:
        """Samples for which every function answered None, and no reward model answers beside them."""
        if not self._is_alone:
            return []
        failed = {failure.index for failure in failures}
        reason = "no function scored it: each answered None."
        missing = [index for index in torch.nonzero(unscored).flatten().tolist() if index not in failed]
        return self._of_all_functions(samples, missing, reason)

    def _beyond(self, samples: Samples, scores: Tensor) -> list[Failure]:
        """Samples whose scores are within the bound, and their weighted sum is not."""
        found = torch.nonzero(~(scores.abs() <= LARGEST_SCORE)).flatten().tolist()
        reason = f"the weighted sum of its scores is not between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
        return self._of_all_functions(samples, found, reason)

    def _of_all_functions(self, samples: Samples, indices: Sequence[int], reason: str) -> list[Failure]:
        names = ", ".join(function.setting for function in self.functions)
        return [Failure(names, index, reason, samples.prompts[index], samples.completions[index]) for index in indices]

    def _spend(self, failures: Sequence[Failure], num_samples: int) -> None:
        """Count failures, say each, and raise past the budget."""
        failed = len({failure.index for failure in failures})
        self._num_failures += failed
        if self._num_failures > self._budget:
            raise RewardError(
                f"The reward function {failures[0]}\n"
                f"{self._num_failures} samples of this run could not be scored so far, {failed} of them in this"
                f" batch of {num_samples}; reward.error_budget={self._budget} allows {self._budget}.",
                remedy="Fix the function or the server; for a sample it cannot score, return None (another function "
                "must then score it); or let N samples of a run fail with reward.error_budget=N.",
            )
        for failure in failures:
            logger.warning("reward failures=%d reward.error_budget=%d: %s", self._num_failures, self._budget, failure)

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


def _checked_weights(config: Reward) -> list[float]:
    """One weight per function, 1 each when none is given."""
    weights = list(config.weights) or [1.0] * len(config.functions)
    assert len(weights) == len(config.functions), f"unchecked before the start: {weights} for {config.functions}"
    return weights
