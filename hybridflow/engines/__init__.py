"""Machines that run a model: `training/interface.py` and `rollout/interface.py` say what they can do."""
