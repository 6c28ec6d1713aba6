"""The transformers rollout at fixed addresses: graphs against plain steps, and those against the plain loop."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.requests import Responses
from hybridflow.engines.rollout.transformers.attention import use_decoding_attention
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.engines.rollout.transformers.fixed import FixedMemory, Run
from hybridflow.engines.rollout.transformers.graphs import Graphs, run_eagerly
from tests.toys import toy_model
from tests.unit.engines.rollout.rows import decoded, prompt_rows

SAMPLINGS = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=9, top_p=0.8)]
ENDS = (1, 9)
PROMPTS = prompt_rows((5, 90, 2, 40, 7), samples=8)


def model_on(device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = toy_model("qwen3", max_position_embeddings=512).to(device, dtype).eval().requires_grad_(False)
    use_decoding_attention(model)
    return model


def drawn(model: PreTrainedModel, sampling: Sampling, memory: FixedMemory | None, tokens: int = 120) -> Responses:
    return decoded(model, PROMPTS, sampling, tokens=tokens, ends=ENDS, memory=memory)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_draw_what_plain_steps_draw(device, dtype, sampling):
    model = model_on(device, dtype)
    made: list[Run] = []

    def make_run() -> Run:
        made.append(Graphs(device) if device.type == "cuda" else run_eagerly)
        return made[-1]

    memory = FixedMemory(model, make_run)
    expected = drawn(model, sampling, FixedMemory(model, lambda: run_eagerly))
    for _ in range(2):
        found = drawn(model, sampling, memory)
        assert torch.equal(found.tokens.lengths, expected.tokens.lengths)
        assert torch.equal(found.tokens.values, expected.tokens.values)  # the same kernels on the same sizes
        assert torch.equal(found.logprobs.values, expected.logprobs.values)
    if device.type == "cuda":
        assert isinstance(made[-1], Graphs) and len(made[-1]._graphs) > 2


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_steps_at_fixed_addresses_draw_what_the_plain_loop_draws(device, sampling):
    model = model_on(device)
    found = drawn(model, sampling, FixedMemory(model, lambda: run_eagerly))
    expected = drawn(model, sampling, None)
    pairs = list(zip(found.tokens.rows(), expected.tokens.rows(), strict=True))
    same = [torch.equal(own, other) for own, other in pairs]
    # Sums in another order move probabilities by 1e-6: of 4,800 draws, hardly one falls to another token.
    assert sum(same) >= len(same) - 1
    assert sum(len(own) == len(other) for own, other in pairs) >= len(same) - 1


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_no_step(device):
    model, steps = model_on(device), []

    def run(key: Hashable, step: Callable[[], None]) -> None:
        with no_waiting(device):
            step()
        steps.append(key)

    drawn(model, SAMPLINGS[2], FixedMemory(model, lambda: run), tokens=40)
    assert steps


def test_an_engine_that_sleeps_gives_back_its_cache_and_draws_the_same_afterwards(device):
    engine = TransformersEngine(model_on(device), max_sequences=64, eos_token_ids=ENDS)
    answers, memories = [], []
    for _ in range(2):
        if device.type == "cuda":
            memories.append(torch.cuda.memory_reserved(device))
        batch = engine.generate(PROMPTS, Sampling(), max_response_tokens=60, seed=0)
        answers.append(batch.tokens("response_ids").values.tolist())
        engine.sleep([*engine.weight_slots().values()])
        engine.wake()
    assert answers[0] == answers[1]
    assert memories == [] or memories[1] <= memories[0] + (32 << 20)  # workspaces of libraries stay
