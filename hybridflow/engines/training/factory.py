"""Training engines by name, for language models and value models."""

from collections.abc import Callable

import torch

from hybridflow.config.model import Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.families import LANGUAGE, VALUE, EngineSetup, tokenizer_directory
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.optional import check_installed
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
    engine = setup.training.engine
    if engine is TrainingEngine.auto:
        engine = TrainingEngine.single if setup.ranks.mesh.size == 1 else TrainingEngine.fsdp
    return _ENGINES[engine](setup)


def _single(setup: EngineSetup) -> TrainEngine:
    from hybridflow.engines.training.single import SingleEngine

    return SingleEngine(setup)


def _fsdp(setup: EngineSetup) -> TrainEngine:
    from hybridflow.engines.training.fsdp.engine import FsdpEngine

    return FsdpEngine(setup)


def _megatron(setup: EngineSetup) -> TrainEngine:
    check_installed("megatron")
    from hybridflow.engines.training.megatron.engine import MegatronEngine

    return MegatronEngine(setup)


_ENGINES: dict[TrainingEngine, Callable[[EngineSetup], TrainEngine]] = {
    TrainingEngine.single: _single,
    TrainingEngine.fsdp: _fsdp,
    TrainingEngine.megatron: _megatron,
}
