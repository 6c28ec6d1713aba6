"""vLLM inside a training process: it draws all rows at once, whatever else is in the batch."""

from importlib.util import find_spec

import pytest
import torch

from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from tests.unit.engines.rollout.rows import prompt_rows, responses

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_rows_are_drawn_without_generators_and_alone_as_together(toy_dir, device, monkeypatch):
    engine = make_rollout_engine(
        Model(path=str(toy_dir("llama", max_position_embeddings=256))),
        Rollout(engine=RolloutKind.vllm, max_sequences=64, vllm=Vllm(kv_cache_mb=64, enforce_eager=True)),
        max_prompt_tokens=64,
        max_response_tokens=32,
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
