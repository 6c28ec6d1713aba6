import json
from importlib import import_module

import pytest
import torch

from hybridflow.engines.rollout.vllm.environment import import_vllm
from hybridflow.engines.vllm_limits import CPU_HEAD_SIZES, check_limits, unsupported_reason
from hybridflow.errors import ConfigError
from hybridflow.models.names.vllm import stage_layers


@pytest.mark.parametrize(
    ("config", "device", "word"),
    [
        ({"head_dim": 32}, "cpu", None),
        ({"hidden_size": 64, "num_attention_heads": 8}, "cpu", "size 8;"),
        ({"hidden_size": 240, "num_attention_heads": 6}, "cpu", "size 40;"),
        ({"hidden_size": 288, "num_attention_heads": 6}, "cuda", None),
        ({"head_dim": 12}, "cuda", "size 12;"),
        ({"head_dim": 512}, "cuda", "size 512;"),
        ({"text_config": {"head_dim": 64}}, "cpu", None),
        ({"hidden_size": 512, "num_attention_heads": 8, "head_dim": None}, "cpu", None),
        ({"d_model": 64}, "cpu", "head_dim"),
    ],
)
def test_models_that_vllm_cannot_run_are_recognized_by_their_heads(config, device, word):
    reason = unsupported_reason(config, device)
    assert reason is None if word is None else word in str(reason)


@pytest.mark.parametrize(
    ("hidden", "pipeline", "words"),
    [
        (256, 2, ("rollout.parallelism.pipeline=2", "CPU", "rollout.parallelism.tensor")),
        (128, 1, ("size 16", "rollout.engine=transformers")),
    ],
)
def test_what_vllm_cannot_do_on_a_device_is_refused_in_the_words_of_the_configuration(
    tmp_path, hidden, pipeline, words
):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_attention_heads": 8}))
    with pytest.raises(ConfigError) as caught:
        check_limits(tmp_path, "cpu", pipeline=pipeline)
    assert all(word in str(caught.value) for word in words)
    check_limits(tmp_path, "cuda", pipeline=pipeline)


@pytest.mark.vllm
def test_the_head_sizes_are_those_of_the_installed_vllm():
    import_vllm(torch.device("cpu"))
    backend = import_module("vllm.v1.attention.backends.cpu_attn")
    assert {*CPU_HEAD_SIZES} - {48} == {*backend.CPUAttentionBackend.get_supported_head_sizes()}


@pytest.mark.vllm
@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 3), (28, 8), (61, 16)])
def test_pipeline_stages_are_those_of_the_installed_vllm(layers, stages):
    import_vllm(torch.device("cpu"))
    utilities = import_module("vllm.distributed.utils")
    for stage in range(stages):
        assert range(*utilities.get_pp_indices(layers, stage, stages)) == stage_layers(layers, stage, stages)
