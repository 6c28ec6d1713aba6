"""Megatron-Core as a training engine. Read `engine.py` first, then `model.py`.

Importing the package adapts Megatron-Core to machines without CUDA, before any of its files imports it.
"""

from hybridflow.engines.training.megatron import cpu_adapter

__all__ = ["cpu_adapter"]
