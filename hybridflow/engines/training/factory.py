"""Training engines by name, for language models and value models."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.config.model import Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.engines.training.outputs import ModelT, Predictor, language_outputs, value_outputs
from hybridflow.engines.training.single import SingleEngine
from hybridflow.errors import EngineError
from hybridflow.models.heads import load_value_model, save_value_model
from hybridflow.models.loading import load_causal_lm, resolve_model_path, save_causal_lm, torch_dtype

_ENGINES = {TrainingEngine.single: SingleEngine}


@dataclass(frozen=True)
class _Family(Generic[ModelT]):
    """How models of one kind are read, written and asked; `backbone` is the part with the layers."""

    load: Callable[..., ModelT]
    save: Callable[..., None]
    predict: Predictor[ModelT]
    backbone: Callable[[ModelT], PreTrainedModel]


_LANGUAGE = _Family(load_causal_lm, save_causal_lm, language_outputs, backbone=lambda model: model)
_VALUE = _Family(load_value_model, save_value_model, value_outputs, backbone=lambda model: model.backbone)


def make_language_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, pad_token_id: int, device: torch.device
) -> TrainEngine:
    """An engine for a causal language model: log-probabilities and entropy."""
    return _make(_LANGUAGE, model, training, total_optimizer_steps, pad_token_id, device)


def make_value_engine(
    model: Model, training: Training, *, total_optimizer_steps: int, pad_token_id: int, device: torch.device
) -> TrainEngine:
    """An engine for a value model: one number a token."""
    return _make(_VALUE, model, training, total_optimizer_steps, pad_token_id, device)


def tokenizer_directory(model: Model) -> Path:
    """Where a model's tokenizer is."""
    return resolve_model_path(str(model.tokenizer_path or model.path))


def _make(
    family: _Family[ModelT],
    model: Model,
    training: Training,
    total_optimizer_steps: int,
    pad_token_id: int,
    device: torch.device,
) -> TrainEngine:
    """Models stay in evaluation mode, so that a token has one probability: no dropout, no router noise."""
    tokenizer = tokenizer_directory(model)

    def load(path: Path) -> ModelT:
        return family.load(
            path, dtype=torch_dtype(model.dtype), device=device, trust_remote_code=model.trust_remote_code
        )

    trained = load(resolve_model_path(str(model.path)))
    if training.gradient_checkpointing:
        _checkpoint_layers(family.backbone(trained))
    return _ENGINES[training.engine](
        trained,
        family.predict,
        training=training,
        total_optimizer_steps=total_optimizer_steps,
        pad_token_id=pad_token_id,
        save_model=lambda saved, path: family.save(saved, path, tokenizer_from=tokenizer),
        load_model=load,
    )


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
