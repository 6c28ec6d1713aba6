"""The learning rate at each optimizer step."""

import math

from hybridflow.config.training import Optimizer, Schedule


def learning_rate(step: int, *, optimizer: Optimizer, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then constant, or falling to 0 at the end."""
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    if optimizer.schedule is Schedule.linear:
        return peak * (1.0 - progress)
    if optimizer.schedule is Schedule.cosine:
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak
