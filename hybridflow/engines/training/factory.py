"""Training engines by name, for language models and value models."""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.config.model import Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.engines.training.outputs import language_outputs, value_outputs
from hybridflow.engines.training.single import SingleEngine
from hybridflow.errors import EngineError
from hybridflow.models.heads import load_value_model, save_value_model
from hybridflow.models.loading import load_causal_lm, resolve_model_path, save_causal_lm, torch_dtype

_ENGINES = {TrainingEngine.single: SingleEngine}


def make_language_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, pad_token_id: int, device: torch.device
) -> TrainEngine:
    """An engine for a causal language model: log-probabilities and entropy."""
    directory = resolve_model_path(str(model.path))
    tokenizer = tokenizer_directory(model)

    def load(path: Path):
        return load_causal_lm(
            path, dtype=torch_dtype(model.dtype), device=device, trust_remote_code=model.trust_remote_code
        )

    return _ENGINES[training.engine](
        _prepared(load(directory), training),
        language_outputs,
        training=training,
        total_optimizer_steps=total_optimizer_steps,
        pad_token_id=pad_token_id,
        save_model=lambda trained, path: save_causal_lm(trained, path, tokenizer_from=tokenizer),
        load_model=load,
    )


def make_value_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, pad_token_id: int, device: torch.device
) -> TrainEngine:
    """An engine for a value model: one number a token."""
    directory = resolve_model_path(str(model.path))
    tokenizer = tokenizer_directory(model)

    def load(path: Path):
        return load_value_model(
            path, dtype=torch_dtype(model.dtype), device=device, trust_remote_code=model.trust_remote_code
        )

    trained = load(directory)
    _prepared(trained.backbone, training)
    return _ENGINES[training.engine](
        trained,
        value_outputs,
        training=training,
        total_optimizer_steps=total_optimizer_steps,
        pad_token_id=pad_token_id,
        save_model=lambda value_model, path: save_value_model(value_model, path, tokenizer_from=tokenizer),
        load_model=load,
    )


def tokenizer_directory(model: Model) -> Path:
    """Where a model's tokenizer is."""
    return resolve_model_path(str(model.tokenizer_path or model.path))


def _prepared(model: PreTrainedModel, training: Training) -> PreTrainedModel:
    """Models stay in evaluation mode, so that a token has one probability: no dropout, no router noise."""
    if training.gradient_checkpointing:
        _checkpoint_layers(model)
    return model


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Recomputes each layer in the backward pass.

    transformers does so in training mode alone: the layers themselves are put in it, and not the modules in them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise EngineError(
            f"{type(model).__name__} does not support gradient_checkpointing=true.",
            remedy="Leave it out, and lower microbatch_tokens when memory runs out.",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
        for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)
