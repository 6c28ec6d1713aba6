from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from hybridflow.engines.rollout.vllm.environment import import_vllm
from hybridflow.engines.rollout.vllm.limits import CPU_HEAD_SIZES, unsupported_reason


@pytest.mark.parametrize(
    ("config", "device", "word"),
    [
        ({"head_dim": 32}, "cpu", None),
        ({"hidden_size": 64, "num_attention_heads": 8}, "cpu", "size 8;"),
        ({"hidden_size": 288, "num_attention_heads": 6}, "cpu", "size 48;"),
        ({"hidden_size": 288, "num_attention_heads": 6}, "cuda", None),
        ({"head_dim": 12}, "cuda", "size 12;"),
        ({"head_dim": 512}, "cuda", "size 512;"),
        ({"text_config": {"head_dim": 64}}, "cpu", None),
        ({"hidden_size": 512, "num_attention_heads": 8, "head_dim": None}, "cpu", None),
        ({"d_model": 64}, "cpu", "head_dim"),
    ],
)
def test_models_that_vllm_cannot_run_are_told_apart_by_their_heads(config, device, word):
    reason = unsupported_reason(config, device)
    assert reason is None if word is None else word in str(reason)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_head_sizes_are_those_of_the_installed_vllm():
    import_vllm(torch.device("cpu"))
    backend = import_module("vllm.v1.attention.backends.cpu_attn")
    assert list(CPU_HEAD_SIZES) == backend.CPUAttentionBackend.get_supported_head_sizes()
