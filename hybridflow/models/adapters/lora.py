"""LoRA on the linear layers of a Hugging Face model, added by peft; the model itself is frozen."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.training import Lora
from hybridflow.errors import ConfigError, raised_together
from hybridflow.models.heads import ValueModel
from hybridflow.models.names.huggingface import canonical_name
from hybridflow.optional import require
from hybridflow.parallel.layout import WeightShard

DOWN, UP = "lora_A", "lora_B"
"""peft's names of the matrices A [rank, in] and B [out, rank] in W + alpha / rank * B A."""


class Adapter:
    """The adapter of a model: W x becomes W x + alpha / rank * B A x (arXiv:2106.09685); only A and B are trained.

    They have the model's dtype; if that is bfloat16, optimizers step float32 copies of them. The head of a value model
    is also trained.

        adapter = Adapter(model, config.actor.lora)     # changes the model in place
        with adapter.off():
            ...                                         # the base model
    """

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Lora) -> None:
        backbone = model.backbone if isinstance(model, ValueModel) else model
        self.settings = settings
        self.has_value_head = isinstance(model, ValueModel)
        self.targets = chosen_targets(backbone, settings.targets)
        peft = require("peft")
        config = peft.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(self.targets))
        backbone.requires_grad_(False)
        peft.inject_adapter_in_model(config, backbone)
        backbone.eval()
        layer_class = peft.tuners.lora.LoraLayer
        layers = {name: module for name, module in model.named_modules() if isinstance(module, layer_class)}
        self._layers: list[Any] = list(layers.values())
        self.adapted = frozenset(canonical_name(f"{name}.weight") for name in layers)
        """Canonical names of the adapted weights."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.settings.alpha / self.settings.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disables the adapter for the block."""
        for layer in self._layers:
            layer.enable_adapters(False)
            # peft freezes disabled adapters, and FSDP keeps the state of its first pass.
            layer.lora_A.requires_grad_(True)
            layer.lora_B.requires_grad_(True)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)


def chosen_targets(model: PreTrainedModel, targets: Sequence[str], *, key: str = "lora.targets") -> tuple[str, ...]:
    """The names of the linear layers to adapt: the given ones, or all except the language head.

    A name matches every layer whose path ends with it. `key` is the setting of the names, for errors.
    """
    head = model.get_output_embeddings()
    paths = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    kinds = sorted({path.rpartition(".")[2] for path in paths})
    with raised_together() as faults:
        for target in targets:
            remedy = f"{did_you_mean(target, kinds)}Use some of: {', '.join(kinds)}; or leave it out for all."
            if not any(path == target or path.endswith(f".{target}") for path in paths):
                found = f"{key} names '{target}', but the model has no such linear layer to adapt."
                faults.add(ConfigError(found, remedy=remedy))
    return tuple(targets) or tuple(kinds)


def is_adapter_weight(name: str) -> bool:
    """Whether a canonical name is that of an A or a B."""
    return f".{DOWN}." in name or f".{UP}." in name


@torch.no_grad()
def initialize(shards: Iterable[WeightShard]) -> None:
    """Initializes A uniformly within +-1 / sqrt(in), and B with zeros, so that a new adapter changes nothing.

    The values depend only on name and shape, so an adapter starts the same with every engine and layout.
    """
    for shard in shards:
        if f".{UP}." in shard.name:
            shard.tensor.zero_()
        elif f".{DOWN}." in shard.name:
            generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
            bound = shard.layout.shape[1] ** -0.5
            whole = torch.empty(shard.layout.shape).uniform_(-bound, bound, generator=generator)
            shard.tensor.copy_(whole[tuple(slice(low, high) for low, high in shard.layout.box)])
