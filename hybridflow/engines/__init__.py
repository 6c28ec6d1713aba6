"""Engines that run a model; `training/interface.py` and `rollout/interface.py` define their methods."""
