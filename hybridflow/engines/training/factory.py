"""Makes training engines by name, for language models and value models."""

from collections.abc import Callable
from typing import cast

import torch

from hybridflow.config.model import Model
from hybridflow.config.training import Training
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.engines.training.setup import LANGUAGE, VALUE, EngineSetup, tokenizer_directory
from hybridflow.engines.traits import traits_of
from hybridflow.models.geometry import read_geometry
from hybridflow.models.names.layouts import layout_problem
from hybridflow.parallel.groups import Ranks

__all__ = ["make_language_engine", "make_value_engine", "tokenizer_directory"]


def make_language_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, device: torch.device, ranks: Ranks
) -> TrainEngine:
    """An engine for a causal language model: log-probabilities and entropy. Called on all ranks together."""
    return _made(EngineSetup(LANGUAGE, model, training, total_optimizer_steps, device, ranks))


def make_value_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, device: torch.device, ranks: Ranks
) -> TrainEngine:
    """An engine for a value model: one number per token. Called on all ranks together."""
    return _made(EngineSetup(VALUE, model, training, total_optimizer_steps, device, ranks))


def _made(setup: EngineSetup) -> TrainEngine:
    sizes, traits = setup.training.parallelism, traits_of(setup.training.engine, setup.ranks.mesh.size)
    make = cast(Callable[[EngineSetup], TrainEngine], traits.load_class())
    if traits.weights.needs_known_names or sizes.tensor * sizes.sequence > 1:
        problem = layout_problem(read_geometry(setup.directory), traits.weights, sizes)
        assert problem is None, f"not rejected before the start: {problem}"
    return make(setup)
