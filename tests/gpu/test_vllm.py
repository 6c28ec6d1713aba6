"""vLLM inside a training process: it draws all rows at once, and its cache is the one that was planned."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from hybridflow.config.model import Dtype, Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.vllm.memory import plan_memory
from hybridflow.models.geometry import read_geometry
from tests.gpu.conftest import NEEDS_CUDA
from tests.unit.engines.rollout.rows import prompt_rows, responses

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def test_rows_are_drawn_without_generators_and_alone_as_together(toy_dir, device, monkeypatch):
    engine = make_rollout_engine(
        Model(path=str(toy_dir("llama", max_position_embeddings=256))),
        Rollout(engine=RolloutKind.vllm, max_sequences=64, vllm=Vllm(kv_cache_mb=64, enforce_eager=True)),
        limit_tokens=96,
        eos_token_ids=(1,),
        device=device,
    )
    prompts = prompt_rows((5, 40, 2), samples=8)
    # One generator per request would be drawn from row by row, a small kernel each.
    monkeypatch.setattr(torch, "Generator", None)
    whole = responses(engine.generate(prompts, Sampling(), max_response_tokens=8, seed=0))
    parts = [
        responses(engine.generate(part, Sampling(), max_response_tokens=8, seed=0)) for part in prompts.split([1, 23])
    ]
    assert [answer for part in parts for answer in part] == whole
    assert len({tuple(answer) for answer in whole}) > 20


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize(
    ("held_share", "settings"),
    [
        (0.0, Vllm(gpu_memory_fraction=0.15)),
        (0.6, Vllm(gpu_memory_fraction=0.15)),
        (0.8, Vllm(gpu_memory_fraction=0.4, kv_cache_mb=64)),  # less is free than the fraction, and enough
    ],
    ids=["alone", "beside another role", "beside a large role"],
)
def test_the_cache_does_not_depend_on_what_another_role_holds(toy_dir, held_share, settings):
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(int(held_share * free), dtype=torch.uint8, device="cuda")
    directory = toy_dir("llama", max_position_embeddings=256)
    rollout = Rollout(engine=RolloutKind.vllm, max_sequences=64, vllm=replace(settings, enforce_eager=True))
    engine = make_rollout_engine(
        Model(path=str(directory)), rollout, limit_tokens=96, eos_token_ids=(1,), device=torch.device("cuda", 0)
    )
    planned = plan_memory(
        read_geometry(directory), Dtype.float32, rollout, device_bytes=total, sequence_tokens=96
    ).cache
    assert 0.98 * planned < engine.sleep(engine.weight_slots().values()).cache_bytes <= planned
    assert held.nbytes == int(held_share * free)
