"""Models without weights: the modules are those of the loaded model, and nothing but buffers has memory."""

import pytest
import torch
from torch import nn

from hybridflow.models.heads import load_value_model
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.skeleton import causal_lm_skeleton, value_model_skeleton

PAIRS = [(causal_lm_skeleton, load_causal_lm), (value_model_skeleton, load_value_model)]


def description(model: nn.Module) -> dict[str, tuple]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("outline", "load"), PAIRS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "gemma2"])
def test_a_skeleton_is_the_model_without_memory(model_dir, architecture, outline, load):
    directory = model_dir(architecture)
    skeleton = outline(directory, dtype=torch.bfloat16)
    model = load(directory, dtype=torch.bfloat16, device="cpu")
    assert description(skeleton) == description(model)
    assert str(skeleton) == str(model)
    assert not skeleton.training
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(skeleton.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in skeleton.named_buffers())


def test_tied_weights_stay_tied(model_dir):
    skeleton = causal_lm_skeleton(model_dir("llama tied"), dtype=torch.float32)
    assert skeleton.get_output_embeddings().weight is skeleton.get_input_embeddings().weight
