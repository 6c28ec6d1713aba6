"""What is rewarded."""

from dataclasses import dataclass, field

from hybridflow.config.section import Section


@dataclass
class Reward(Section):
    """Reward functions, added up with weights."""

    functions: list[str] = field(default_factory=lambda: ["exact_match"])
    """Built-in names, dotted paths (`my_lib.rewards.f`) or files (`path/reward.py:f`)."""

    weights: list[float] = field(default_factory=list)
    """One weight a function; empty means 1 each."""

    format_pattern: str | None = None
    """Regular expression that the built-in `format` function wants the whole response to match."""

    error_budget: int = 0
    """Samples whose reward may fail, on each rank that scores, before the run stops; failures are counted and shown."""
