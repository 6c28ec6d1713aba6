"""The built-in reward functions; `rewards/factory.py` gives them their names."""

from hybridflow.rewards.functions.exact_match import exact_match
from hybridflow.rewards.functions.format import FormatReward
from hybridflow.rewards.functions.gsm8k import gsm8k

__all__ = ["FormatReward", "exact_match", "gsm8k"]
