"""The kinds of models that engines train (language models and value models), and the setup of an engine."""

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
from hybridflow.engines.training.host_memory import HostPool, host_link
from hybridflow.engines.training.outputs import LanguageOutputs, TokenModel, ValueOutputs
from hybridflow.errors import EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, plan_adapter
from hybridflow.models.adapters.lora import Adapter
from hybridflow.models.geometry import read_geometry
from hybridflow.models.heads import ValueModel, load_value_model, save_value_model
from hybridflow.models.loading import (
    Head,
    copy_description,
    load_causal_lm,
    resolve_model_path,
    resolve_tokenizer_path,
    save_causal_lm,
    torch_dtype,
)
from hybridflow.models.names.rules import MODEL_TYPES
from hybridflow.models.packed_attention import length_dependent_rotations, use_packed_attention
from hybridflow.models.shard_files import PlannedDirectory
from hybridflow.models.skeleton import causal_lm_skeleton, value_model_skeleton
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelKind:
    """How models of one kind are loaded, saved and run.

    Language models are a `PreTrainedModel`, value models a `ValueModel`. `backbone` is the part with the layers, and
    `skeleton` makes the modules without memory for parameters.
    """

    head: Head
    load: Callable[..., Any]
    skeleton: Callable[..., Any]
    save: Callable[..., None]
    outputs: Callable[[Any], TokenModel]
    backbone: Callable[[Any], PreTrainedModel]


LANGUAGE = ModelKind(
    head="language",
    load=load_causal_lm,
    skeleton=causal_lm_skeleton,
    save=save_causal_lm,
    outputs=LanguageOutputs,
    backbone=lambda model: model,
)
VALUE = ModelKind(
    head="value",
    load=load_value_model,
    skeleton=value_model_skeleton,
    save=save_value_model,
    outputs=ValueOutputs,
    backbone=lambda model: model.backbone,
)


@dataclass(frozen=True)
class EngineSetup:
    """The inputs from which every engine is built."""

    kind: ModelKind
    model: Model
    training: Training
    total_optimizer_steps: int
    device: torch.device
    ranks: Ranks

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return resolve_model_path(str(self.model.path))

    def load(self, directory: Path) -> PreTrainedModel | ValueModel:
        """The whole Hugging Face model in a directory, on the engine's device."""
        return self.kind.load(
            directory,
            dtype=torch_dtype(self.model.dtype),
            device=self.device,
            trust_remote_code=self.model.trust_remote_code,
        )

    def skeleton(self) -> PreTrainedModel | ValueModel:
        """The model's modules, without memory for parameters."""
        return self.kind.skeleton(
            self.directory, dtype=torch_dtype(self.model.dtype), trust_remote_code=self.model.trust_remote_code
        )

    def pool(self) -> HostPool | None:
        """Host memory for offloading; None on a CPU, where tensors are in host memory already."""
        link = host_link(self.device)
        return None if link is None else HostPool(link)

    def add_adapter(self, model: PreTrainedModel | ValueModel) -> Adapter | None:
        """Adds the configured LoRA adapter to a model, in place, and freezes the base model."""
        return Adapter(model, self.training.lora) if self.training.lora.rank else None

    def plan_adapter(self, adapter: Adapter, shards: Iterable[WeightShard], directory: Path) -> PlannedDirectory:
        """Plans `directory/adapter`, from the shards that all ranks hold of a model with an adapter."""
        path = str(self.model.path)
        is_local = path.startswith("builtin:") or user_path(path).exists()
        base_model = str(self.directory) if is_local else path
        return plan_adapter(adapter, shards, directory / ADAPTER_DIRECTORY, self.ranks, base_model=base_model)

    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the model as a Hugging Face directory, with its tokenizer."""
        self.kind.save(model, directory, tokenizer_from=tokenizer_directory(self.model))

    def describe(self, directory: Path) -> None:
        """Writes everything in a Hugging Face directory except the weights."""
        copy_description(
            self.directory,
            directory,
            head=self.kind.head,
            dtype=torch_dtype(self.model.dtype),
            tokenizer_from=tokenizer_directory(self.model),
            trust_remote_code=self.model.trust_remote_code,
        )

    @property
    def has_known_names(self) -> bool:
        """Whether `models/names` has rules for the model's weights, so that they can be written in shards."""
        return read_geometry(self.directory).model_type in MODEL_TYPES


def tokenizer_directory(model: Model, *, key: str = "model.path") -> Path:
    """The directory of a model's tokenizer; `key` is the setting of the model's path, for errors."""
    if model.tokenizer_path:
        return resolve_tokenizer_path(model.tokenizer_path, key=f"{key.removesuffix('path')}tokenizer_path")
    return resolve_model_path(model.path or "", key=key)


def prepared(setup: EngineSetup, model: PreTrainedModel | ValueModel) -> TokenModel:
    """The model as engines call it: with packed attention, and with recomputed layers if the configuration says so.

    Models stay in evaluation mode (no dropout, no router noise), so that the probability of a token is deterministic.
    """
    backbone = setup.kind.backbone(model)
    is_packed = use_packed_attention(backbone)
    if setup.ranks.rank == 0:
        if not is_packed:
            logger.warning(
                "model=%s packed=false: %s does not support packed sequences; rows are padded to the longest in each"
                " microbatch",
                setup.model.path,
                type(backbone).__name__,
            )
        for kind in length_dependent_rotations(backbone):
            logger.warning(
                "model=%s rope_type=%s: beyond the model's original context length, a token's probability depends on"
                " the other sequences in its microbatch",
                setup.model.path,
                kind,
            )
    if setup.training.gradient_checkpointing:
        _checkpoint_layers(backbone)
    return setup.kind.outputs(model)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Recomputes each layer in the backward pass.

    transformers does so only in training mode, so the layers are put into it, but not the modules inside them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise EngineError(
            f"{type(model).__name__} does not support gradient checkpointing.",
            remedy="Set actor.gradient_checkpointing=false (for a critic, critic.gradient_checkpointing), and lower"
            " actor.microbatch_tokens if memory is short.",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
        for name in [name for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)
