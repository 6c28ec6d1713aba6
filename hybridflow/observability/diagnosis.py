"""Recognizes from a run's metrics that nothing is being learned, and says what to do about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridflow.errors import Advice, NumericError

PATIENCE_STEPS = 3
"""Consecutive steps that must show most signs before they are reported."""

_MOST_CUT_OFF = 0.9


@dataclass(frozen=True)
class _Sign:
    """A metric whose value shows that little or nothing can be learned."""

    metric: str
    shows: Callable[[float], bool]
    title: str
    found: str
    remedy: str
    patience_steps: int = PATIENCE_STEPS


SIGNS = (
    _Sign(
        "environment/failed_fraction",
        lambda value: value >= 1.0,
        "All episodes fail",
        "no episode has a score of its own, so nothing is being learned (environment/failed_fraction=1)",
        "The warnings in the log have the reasons of the first failures. Fix the environment, or give it more time"
        " (environment.step_seconds, environment.episode_seconds).",
    ),
    _Sign(
        "response_length/clip_ratio",
        lambda value: value > _MOST_CUT_OFF,
        "Responses are cut off",
        f"more than {_MOST_CUT_OFF:.0%} of them reach data.max_response_tokens before they end"
        " (response_length/clip_ratio)",
        "Read the samples. Raise data.max_response_tokens, or start from a model that ends its responses: an"
        " instruction-tuned one with its chat template (data.as_chat=true for plain-text prompts).",
    ),
    _Sign(
        "frac_reward_zero_std",
        lambda value: value >= 1.0,
        "Nothing is being learned",
        "all samples of each prompt have the same score, so no sample is better than another (frac_reward_zero_std=1)",
        "Read the samples: would you score them as the reward does? Use easier prompts (harder ones if all scores are"
        " high), or raise rollout.samples_per_prompt.",
    ),
    _Sign(
        "actor/grad_norm",
        lambda value: value == 0.0,
        "Nothing is being learned",
        "the gradient is zero (actor/grad_norm=0)",
        "Read the samples and their scores. Scores that are all equal give no advantage; algorithm.mask_truncated=true"
        " excludes responses that are cut off; a loss of your own must depend on the log-probabilities.",
    ),
    _Sign(
        "guards/skipped_updates",
        lambda value: value > 0.0,
        "Optimizer steps are skipped",
        "guards refuse them, and leave weights and optimizer as they are (guards/skipped_updates)",
        "Lower the learning rate, or check the last samples and rewards for values out of range; if most steps are"
        " skipped, raise the limits (actor.guards, critic.guards).",
    ),
    _Sign(
        "guards/exceeded",
        lambda value: value > 0.0,
        "A limit is exceeded",
        "the loss, the gradient's norm, the ratio or the KL divergence of an optimizer step is above its limit in"
        " actor.guards or critic.guards (guards/exceeded)",
        "Lower the learning rate, or let the guard act: action=skip or action=fault.",
        patience_steps=1,
    ),
    _Sign(
        "guards/replicas_differ",
        lambda value: value > 0.0,
        "Replicas differ",
        "data-parallel replicas of a model hold different weights (guards/replicas_differ)",
        "Check the devices and their memory (ECC errors), and code of your own that changes weights on some ranks only;"
        " then return to an earlier checkpoint.",
        patience_steps=1,
    ),
)
_OF_NO_LEARNING = SIGNS[:4]
_FAILURES, _, _TIES, _NO_GRADIENT = _OF_NO_LEARNING


class Diagnosis:
    """Follows the metrics of a run, step by step.

    diagnosis = Diagnosis()
    for advice in diagnosis.update(step, metrics):      # once for each sign, at its third consecutive step
        logger.warning("%s", advice)
    diagnosis.standing()                                # the signs that the latest steps still show
    """

    def __init__(self) -> None:
        self._streaks: dict[_Sign, tuple[int, int, int]] = {}
        self._reported: set[_Sign] = set()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Advice]:
        """Follows one step; returns what is newly recognized. A step without a metric leaves its sign as it is."""
        for sign in SIGNS:
            if sign.metric in metrics:
                first, _, count = self._streaks.get(sign, (step, step, 0))
                if sign.shows(metrics[sign.metric]):
                    self._streaks[sign] = (first, step, count + 1)
                else:
                    self._streaks.pop(sign, None)
        new = [sign for sign in self._standing() if sign not in self._reported]
        self._reported.update(new)
        return [self._advice(sign) for sign in new]

    def standing(self) -> list[Advice]:
        """The signs that the latest steps show."""
        return [self._advice(sign) for sign in self._standing()]

    def no_learning(self, steps: int) -> Advice | None:
        """The first sign that nothing has been learned for at least so many steps."""
        return next(
            (self._advice(s) for s in _OF_NO_LEARNING if s in self._streaks and self._streaks[s][2] >= steps), None
        )

    def no_learning_error(self, steps: int | None) -> NumericError | None:
        """The error of a run that ends after so many steps without learning (`trainer.no_learning_steps`)."""
        if steps is None or (advice := self.no_learning(steps)) is None:
            return None
        return NumericError(
            f"{advice.message} The run ends here (trainer.no_learning_steps={steps}).", remedy=advice.remedy
        )

    def _standing(self) -> list[_Sign]:
        found = [sign for sign, (_, _, count) in self._streaks.items() if count >= sign.patience_steps]
        explained = {_TIES: {_FAILURES}, _NO_GRADIENT: {_FAILURES, _TIES}}
        return [sign for sign in found if explained.get(sign, set()).isdisjoint(found)]

    def _advice(self, sign: _Sign) -> Advice:
        first, last, _ = self._streaks[sign]
        return Advice(f"{sign.title} (steps {first} to {last}): {sign.found}.", sign.remedy)
