"""Language models and value models: how each kind is read, written and asked."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.config.model import Model
from hybridflow.config.paths import user_path
from hybridflow.config.training import Training
from hybridflow.engines.training.host_memory import HostShelf, lane_to
from hybridflow.engines.training.outputs import LanguageOutputs, TokenModel, ValueOutputs
from hybridflow.errors import EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, save_adapter
from hybridflow.models.adapters.lora import Adapter
from hybridflow.models.description import Head, copy_description
from hybridflow.models.geometry import read_geometry
from hybridflow.models.heads import ValueModel, load_value_model, save_value_model
from hybridflow.models.loading import load_causal_lm, resolve_model_path, save_causal_lm, torch_dtype
from hybridflow.models.names.rules import MODEL_TYPES
from hybridflow.models.packed_attention import use_packed_attention
from hybridflow.models.skeleton import causal_lm_skeleton, value_model_skeleton
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

logger = logging.getLogger(__name__)

_ROTATIONS_BY_LENGTH = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Family:
    """How models of one kind are read, written and asked; `backbone` is the part with the layers.

    The model is a `PreTrainedModel` in the language family and a `ValueModel` in the value family.
    """

    name: Head
    read: Callable[..., Any]
    outline: Callable[..., Any]
    write: Callable[..., None]
    ask: Callable[[Any], TokenModel]
    backbone: Callable[[Any], PreTrainedModel]


LANGUAGE = Family(
    name="language",
    read=load_causal_lm,
    outline=causal_lm_skeleton,
    write=save_causal_lm,
    ask=LanguageOutputs,
    backbone=lambda model: model,
)
VALUE = Family(
    name="value",
    read=load_value_model,
    outline=value_model_skeleton,
    write=save_value_model,
    ask=ValueOutputs,
    backbone=lambda model: model.backbone,
)


@dataclass(frozen=True)
class EngineSetup:
    """The settings of every engine."""

    family: Family
    model: Model
    training: Training
    total_optimizer_steps: int
    device: torch.device
    ranks: Ranks

    @property
    def directory(self) -> Path:
        """Where the model is."""
        return resolve_model_path(str(self.model.path))

    def load(self, directory: Path, device: torch.device | None = None) -> PreTrainedModel | ValueModel:
        """The Hugging Face model in a directory, whole, on the engine's device or another."""
        return self.family.read(
            directory,
            dtype=torch_dtype(self.model.dtype),
            device=device or self.device,
            trust_remote_code=self.model.trust_remote_code,
        )

    def skeleton(self) -> PreTrainedModel | ValueModel:
        """The model's modules, without memory for parameters."""
        return self.family.outline(
            self.directory, dtype=torch_dtype(self.model.dtype), trust_remote_code=self.model.trust_remote_code
        )

    def shelf(self) -> HostShelf | None:
        """Places for the engine's tensors in the host's memory; None on a CPU, which has no other memory."""
        lane = lane_to(self.device)
        return None if lane is None else HostShelf(lane)

    def add_adapter(self, model: PreTrainedModel | ValueModel) -> Adapter | None:
        """Adds the low-rank adapter that the configuration asks for to a model, in place, and freezes the rest."""
        return Adapter(model, self.training.lora) if self.training.lora.rank else None

    def save_adapter(self, adapter: Adapter, shards: Iterable[WeightShard], directory: Path) -> None:
        """Writes `directory/adapter` from what all ranks hold of a model with an adapter."""
        path = str(self.model.path)
        is_local = path.startswith("builtin:") or user_path(path).exists()
        base_model = str(self.directory) if is_local else path
        save_adapter(adapter, shards, directory / ADAPTER_DIRECTORY, self.ranks, base_model=base_model)

    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the model as a Hugging Face directory, with its tokenizer."""
        self.family.write(model, directory, tokenizer_from=tokenizer_directory(self.model))

    def describe(self, directory: Path) -> None:
        """Writes what such a directory holds beside the weights."""
        copy_description(
            self.directory,
            directory,
            head=self.family.name,
            dtype=torch_dtype(self.model.dtype),
            tokenizer_from=tokenizer_directory(self.model),
            trust_remote_code=self.model.trust_remote_code,
        )

    @property
    def has_known_names(self) -> bool:
        """Whether its weights are named on disk as `models/names` says, and can be written in pieces."""
        return read_geometry(self.directory).model_type in MODEL_TYPES


def tokenizer_directory(model: Model) -> Path:
    """Where a model's tokenizer is."""
    return resolve_model_path(str(model.tokenizer_path or model.path))


def prepared(setup: EngineSetup, model: PreTrainedModel | ValueModel) -> TokenModel:
    """The model as engines ask it: attention without padding, and layers recomputed where the configuration says so.

    Models stay in evaluation mode, so that a token has one probability: no dropout, no router noise.
    """
    backbone = setup.family.backbone(model)
    if not use_packed_attention(backbone) and setup.ranks.rank == 0:
        logger.warning(
            "model=%s packed=false: %s cannot be run without padding, rows are padded to the longest of a micro-batch",
            setup.model.path,
            type(backbone).__name__,
        )
    if setup.ranks.rank == 0:
        _warn_of_rotations(setup, backbone)
    if setup.training.gradient_checkpointing:
        _checkpoint_layers(backbone)
    return setup.family.ask(model)


def _warn_of_rotations(setup: EngineSetup, backbone: PreTrainedModel) -> None:
    """Rotary positions of some kinds are scaled by the longest sequence that a model is shown at once, or was."""
    kinds = {kind for module in backbone.modules() if isinstance(kind := vars(module).get("rope_type"), str)}
    for kind in sorted(kinds & _ROTATIONS_BY_LENGTH):
        logger.warning(
            "model=%s rope_type=%s: past its original length a token's probability depends on the sequences beside it",
            setup.model.path,
            kind,
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
