"""The layers of a model compiled by `torch.compile`, which fuses their elementwise operations."""

import os

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.errors import EngineError


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each layer of a model in place, except its attention, for any number of tokens.

    The code is shared by all layers, and compiled at the first call with and without gradients. It stays in the cache
    of `torch.compile` on disk. Raises `EngineError` for a model without layers that transformers knows as such.
    """
    # Ray's workers on CPUs turn compilation off, and PyTorch reads the variable in two places.
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} has no layers that can be compiled.",
            remedy="Set actor.compile=false (for a critic, critic.compile).",
        )
    _leave_attention(model)
    for layer in layers:
        layer.compile(dynamic=True)


def _leave_attention(model: PreTrainedModel) -> None:
    """Keeps the attention of a model out of its compiled code, which would depend on every number of sequences."""
    name = str(model.config._attn_implementation)
    outside = f"{name}_uncompiled"
    AttentionInterface.register(outside, torch.compiler.disable(AttentionInterface()[name]))
    AttentionMaskInterface.register(outside, AttentionMaskInterface()[name])
    model.set_attn_implementation(outside)
