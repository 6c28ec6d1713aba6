"""Scores samples with reward functions: `interface.py` defines what a function is, `scorer.py` applies them.

Nothing here imports torch, so that the processes of `runners/pooled.py` start quickly.
"""

from hybridflow.rewards.interface import Failure, RewardFunction, Samples

__all__ = ["Failure", "RewardFunction", "Samples"]
