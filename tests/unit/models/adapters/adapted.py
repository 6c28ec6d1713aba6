"""Toy models with adapters that have learnt something."""

import torch

from hybridflow.config.training import Lora
from hybridflow.models.adapters.lora import Adapter, initialize
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard


def shards_of(model) -> list[WeightShard]:
    """All of a model's weights, an adapter's apart from the model's own."""
    return [shard for name, p in model.named_parameters() for shard in views(p.data, parts_of(name, p.shape))]


def adapted(model, lora: Lora, *, seed: int | None = 1) -> Adapter:
    """The model's new adapter; with a seed, B is as if it had learnt something."""
    adapter = Adapter(model, lora)
    initialize(shards_of(model))
    for shard in shards_of(model) if seed is not None else ():
        if ".lora_B." in shard.name:
            shard.tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return adapter


def logits(model) -> torch.Tensor:
    """What the model says of some tokens."""
    with torch.no_grad():
        return model(torch.arange(24).view(3, 8)).logits
