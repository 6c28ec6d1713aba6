"""Where each number of the configuration may lie: one table, by the key that a user types."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hybridflow.config.experiment import Experiment
from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The numbers that fit; what is said of others, and what is to be done. Null always fits."""

    fits: Callable[[float], bool]
    found: str
    remedy: str


def _at_least(smallest: int) -> Range:
    return Range(lambda v: v >= smallest, "is too small", f"Use {smallest} or more.")


def _number(expected: str, fits: Callable[[float], bool]) -> Range:
    return Range(fits, "is out of range", f"Use a number {expected}.")


_ONE, _ZERO = _at_least(1), _at_least(0)
_ANY = _number("that is finite", lambda v: True)
_NOT_BELOW_0 = _number("of 0 or more", lambda v: v >= 0)
_ABOVE_0 = _number("above 0", lambda v: v > 0)
_ABOVE_0_OR_NULL = _number("above 0, or null", lambda v: v > 0)
_OF_SCORES = _number("from -3.4e38 to 3.4e38, which float32 can hold", lambda v: abs(v) <= LARGEST_SCORE)
_FROM_0_TO_1 = _number("from 0 to 1", lambda v: 0 <= v <= 1)
_FROM_0_TO_BELOW_1 = _number("from 0 to below 1", lambda v: 0 <= v < 1)
_SHARE = _number("above 0 and up to 1", lambda v: 0 < v <= 1)
_LEARNING_RATE = _number("from 0 to 1: AdamW moves every weight by about as much in each step", lambda v: 0 <= v <= 1)
_EPSILON = _number(
    "of 1e-20 or more: below it, AdamW in float32 divides 0 by 0, or moves a weight without bound", lambda v: v >= 1e-20
)
_TEMPERATURE = _number(
    "of 0.01 or more, or 0 for the most probable token: logits divided by less lose their differences to overflow or"
    " leave one token",
    lambda v: v == 0 or v >= 0.01,
)

_TRAINED: Mapping[str, Range] = {
    "minibatch_size": _ONE,
    "microbatch_tokens": _ONE,
    "epochs": _ONE,
    "lora.alpha": _ABOVE_0,
    "optimizer.learning_rate": _LEARNING_RATE,
    "optimizer.weight_decay": _NOT_BELOW_0,
    "optimizer.beta1": _FROM_0_TO_BELOW_1,
    "optimizer.beta2": _FROM_0_TO_BELOW_1,
    "optimizer.epsilon": _EPSILON,
    "optimizer.max_grad_norm": _NOT_BELOW_0,
    "optimizer.warmup_steps": _ZERO,
    "optimizer.schedule_steps": _ONE,
}
_SAMPLING: Mapping[str, Range] = {"temperature": _TEMPERATURE, "top_p": _SHARE, "top_k": _ZERO}
_PREFERENCE: Mapping[str, Range] = {
    "beta": _ABOVE_0,
    "label_smoothing": _number("from 0 to below 0.5, where labels would say nothing",
                               lambda v: 0 <= v < 0.5),
    "margin": _NOT_BELOW_0,
    "imitation": _NOT_BELOW_0,
    "desirable_weight": _NOT_BELOW_0,
    "undesirable_weight": _NOT_BELOW_0,
    "center_coefficient": _NOT_BELOW_0,
}  # fmt: skip

RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("trainer.total_steps", "trainer.devices", "trainer.nodes", "trainer.threads"), _ONE),
    **dict.fromkeys(("trainer.keep_checkpoints", "trainer.sample_rows"), _ONE),
    **dict.fromkeys(("trainer.seed", "trainer.eval_every", "trainer.save_every", "trainer.samples_every"), _ZERO),
    "trainer.stop_seconds": _ABOVE_0,
    **dict.fromkeys(("data.batch_size", "data.eval_limit"), _ONE),
    **dict.fromkeys(("data.max_prompt_tokens", "data.max_response_tokens"), _ONE),
    **{f"{role}.{name}": fitting for role in ("actor", "critic") for name, fitting in _TRAINED.items()},
    **dict.fromkeys(("trainer.start_timeout_seconds", "trainer.hang_timeout_seconds"), _ABOVE_0),
    "rollout.samples_per_prompt": _ONE,
    **{f"rollout.sampling.{name}": fitting for name, fitting in _SAMPLING.items()},
    **{f"rollout.eval_sampling.{name}": fitting for name, fitting in _SAMPLING.items()},
    "rollout.eval_samples_per_prompt": _ONE,
    "rollout.max_sequences": _ONE,
    "rollout.max_logprob_difference": _ABOVE_0_OR_NULL,
    "rollout.vllm.kv_cache_mb": _ONE,
    "rollout.vllm.gpu_memory_fraction": _SHARE,
    "algorithm.gamma": _FROM_0_TO_1,
    "algorithm.lam": _FROM_0_TO_1,
    "algorithm.clip_low": _SHARE,
    "algorithm.clip_high": _ABOVE_0,
    "algorithm.dual_clip": _number("above 1, or null", lambda v: v > 1),
    "algorithm.value_clip": _ABOVE_0_OR_NULL,
    "algorithm.entropy_coefficient": _ANY,
    "algorithm.pretraining_coefficient": _NOT_BELOW_0,
    "algorithm.kl.coefficient": _NOT_BELOW_0,
    "algorithm.kl.target": _ABOVE_0_OR_NULL,
    "algorithm.kl.horizon": _ONE,
    **{f"algorithm.preference.{name}": fitting for name, fitting in _PREFERENCE.items()},
    "reward.error_budget": _ZERO,
    "reward.processes": _ZERO,
    "reward.timeout_seconds": _ABOVE_0,
    "reward.memory_mb": _ONE,
    "reward.model_weight": _OF_SCORES,
    "reward.microbatch_tokens": _ONE,
}
"""Numbers that stand alone. Those of `data`, of layouts, of pools and of `algorithm.correction` have checks of their
own, for they are judged by one another."""


def check_ranges(config: Experiment) -> None:
    """Raises `ConfigError` for the first number that lies outside of its range, or is none."""
    for key, value, fitting in _numbers(config):
        if value is not None and not (math.isfinite(value) and fitting.fits(value)):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            raise ConfigError(f"{key}={shown} {fitting.found}.", remedy=fitting.remedy)


def _numbers(config: Experiment) -> Iterator[tuple[str, float | None, Range]]:
    for key, fitting in RANGES.items():
        value: object = config
        for name in key.split("."):
            value = vars(value)[name]
        assert value is None or isinstance(value, int | float), f"{key} is no number: {value!r}"
        yield key, value, fitting
    weights = {f"roles.{name}.weights": role.weights for name, role in config.roles.items()}
    for key, values in {"reward.weights": config.reward.weights, **weights}.items():
        yield from ((key, value, _OF_SCORES) for value in values)
