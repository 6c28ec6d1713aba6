"""The length of a run in steps and in epochs, passes over its training data."""

import math
from dataclasses import replace

from hybridflow.config.section import sealed
from hybridflow.dataflows.dapo import DAPO
from hybridflow.launch.plan.data import RunData
from hybridflow.launch.plan.defaults import with_schedule_steps
from hybridflow.launch.plan.plan import RunPlan

_TOTAL, _EPOCHS = "trainer.total_steps", "trainer.epochs"


def with_length(plan: RunPlan, data: RunData) -> RunPlan:
    """The same plan with the total steps that `trainer.epochs` gives, or fewer if the user set `trainer.total_steps`,
    and with the learning-rate schedules that follow them."""
    composed, steps = plan.composed, _steps_of_epochs(plan, data) if plan.config.trainer.total_steps else 0
    if steps and (_TOTAL not in composed.user_keys or steps <= plan.config.trainer.total_steps):
        config = replace(plan.config, trainer=replace(plan.config.trainer, total_steps=steps))
        composed = replace(composed, config=sealed(config), origins={**composed.origins, _TOTAL: _EPOCHS})
    return replace(plan, composed=with_schedule_steps(composed))


def length_in_words(plan: RunPlan, data: RunData) -> str | None:
    """`64 rows / 32 per step = 2 steps per epoch; 150 steps = 75 epochs`; None for a run that only evaluates."""
    if not plan.config.trainer.total_steps:
        return None
    trainer, batch_size, stream = plan.config.trainer, plan.config.data.batch_size, data.streams["prompts"]
    rows = stream.num_used
    total, epochs = trainer.total_steps, trainer.total_steps * batch_size / rows
    per_epoch = _short(rows / batch_size)
    words = f"about {rows:,} of {len(stream):,}" if rows < len(stream) else f"{rows:,}"
    words += f" row{'s' * (rows != 1)} / {batch_size} per step = {per_epoch} step{'s' * (per_epoch != '1')}"
    words += f" per epoch; {total:,} step{'s' * (total != 1)} = {_short(epochs)} epoch{'s' * (epochs != 1)}"
    if isinstance(plan.settings, DAPO.Settings) and plan.settings.max_refills:
        words += f" or more: dynamic sampling may draw up to {plan.settings.max_refills} further batches per step"
    if trainer.epochs is not None and plan.composed.origins[_TOTAL] != _EPOCHS:
        words += f" ({_TOTAL}; {_EPOCHS}={trainer.epochs:g} would be {_steps_of_epochs(plan, data):,} steps)"
    return words


def _steps_of_epochs(plan: RunPlan, data: RunData) -> int:
    """The number of steps for `trainer.epochs`, rounded up: the last batch may reach into another epoch."""
    epochs = plan.config.trainer.epochs
    assert epochs is not None, "no epochs are set"
    return max(1, math.ceil(epochs * data.streams["prompts"].num_used / plan.config.data.batch_size - 1e-9))


def _short(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}".rstrip("0").rstrip(".") if number >= 0.1 else f"{number:.2g}"
