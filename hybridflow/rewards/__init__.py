"""Samples become scores: `interface.py` says what a reward function is, `scorer.py` what is done with it."""

from hybridflow.rewards.interface import Failure, RewardFunction, Samples
from hybridflow.rewards.scorer import RewardScorer, Scored

__all__ = ["Failure", "RewardFunction", "RewardScorer", "Samples", "Scored"]
