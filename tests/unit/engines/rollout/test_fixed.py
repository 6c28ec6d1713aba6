"""Decoding at fixed addresses, in buckets, against the plain loop."""

from collections.abc import Callable, Hashable
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from hybridflow.batch import Batch
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.requests import Responses
from hybridflow.engines.rollout.transformers.attention import use_decoding_attention
from hybridflow.engines.rollout.transformers.fixed import FixedMemory, Run, bucket_of
from hybridflow.engines.rollout.transformers.graphs import can_be_captured, run_eagerly
from hybridflow.models.tokenizers import load_tokenizer
from tests.toys import toy_model
from tests.unit.engines.rollout.rows import decoded, prompt_rows

EXACT = 1e-5
"""float32: sums over masked places as well, in another order; another token's differs by 1e-1 and more."""


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    model = model.eval().requires_grad_(False)
    use_decoding_attention(model)
    return model


def drawn(
    model: PreTrainedModel, prompts: Batch, tokens: int, sampling: Sampling, ends: tuple[int, ...], memory=None
) -> Responses:
    return decoded(model, prompts, sampling, tokens=tokens, ends=ends, memory=memory)


def test_stop_strings_end_rows_at_fixed_addresses_as_in_the_plain_loop(toy_dir):
    model, tokenizer = decoder(toy_model("llama")), load_tokenizer(toy_dir("llama"))
    prompts = prompt_rows(samples=8)

    def ended(stop: list[str], memory: FixedMemory | None) -> Responses:
        return decoded(model, prompts, Sampling(stop=stop), tokens=90, ends=(9,), memory=memory, tokenizer=tokenizer)

    memory = FixedMemory(model, lambda: run_eagerly)
    common = drawn(model, prompts, 90, Sampling(), ()).tokens.values.bincount(minlength=64).topk(2).indices
    first, second = (str(tokenizer.decode(token)) for token in common)
    for stop in ([first], [first + second, first + first]):
        expected = ended(stop, None)
        assert_same(ended(stop, memory), expected)
        by_text = torch.tensor([int(row[-1]) != 9 for row in expected.tokens.rows()])
        lengths = expected.tokens.lengths.tolist()
        assert 3 < int((by_text & ~expected.truncated).sum()) < 48 and len(set(lengths)) > 6


def assert_same(found: Responses, expected: Responses) -> None:
    assert torch.equal(found.tokens.lengths, expected.tokens.lengths)
    assert torch.equal(found.truncated, expected.truncated)
    assert torch.equal(found.tokens.values, expected.tokens.values)
    assert float((found.logprobs.values - expected.logprobs.values).abs().max()) < EXACT


RESTRICTED = Sampling(temperature=0.7, top_k=9, top_p=0.8)
USUAL = [(50, sampling, (1, 9)) for sampling in (Sampling(), Sampling(temperature=0.0), RESTRICTED)]


@pytest.mark.parametrize(
    ("make", "tokens", "sampling", "ends"),
    [
        *((make, *case) for make in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral") for case in USUAL),
        ("llama", 1, Sampling(), (1,)),
        ("llama", 20, Sampling(), ()),
    ],
)
def test_steps_at_fixed_addresses_draw_what_the_plain_loop_draws(make, tokens, sampling, ends):
    model = decoder(toy_model(make, **({"sliding_window": 4} if make == "mistral" else {})))
    prompts = prompt_rows(samples=4)
    expected = drawn(model, prompts, tokens, sampling, ends)
    memory = FixedMemory(model, lambda: run_eagerly)
    for _ in range(2):
        assert_same(drawn(model, prompts, tokens, sampling, ends, memory), expected)


def test_rows_leave_for_smaller_buckets_tokens_get_more_room_and_memory_is_laid_out_again():
    model = decoder(toy_model("llama", max_position_embeddings=512))
    runs: list[list[Hashable]] = []

    def watched() -> Run:
        runs.append([])
        return lambda key, step: (runs[-1].append(key), step())[1]

    memory = FixedMemory(model, watched)
    prompts = prompt_rows(lengths=(100, 3, 60, 118, 7), samples=8)
    ends = tuple(range(1, 4))
    expected = drawn(model, prompts, 150, Sampling(), ends)
    assert_same(drawn(model, prompts, 150, Sampling(), ends, memory), expected)
    kinds = list(dict.fromkeys(runs[-1]))
    assert kinds[0] == (48, 128) and len({kind[0] for kind in kinds}) > 3
    assert {kind[1] for kind in kinds} >= {128, 256}
    assert all(left[0] >= right[0] and left[1] <= right[1] for left, right in pairwise(kinds))
    # Flags come a look late, and a finished row stays for a look more at most.
    assert len(runs[-1]) <= int(expected.tokens.lengths.max()) + 2 * 16
    before = [region.data_ptr() for region in memory._regions]
    few = prompts.slice(0, 8)
    assert_same(drawn(model, few, 150, Sampling(), ends, memory), drawn(model, few, 150, Sampling(), ends))
    assert [region.data_ptr() for region in memory._regions] == before and len(runs) == 2


def test_a_step_does_nothing_on_the_host():
    """What a graph would replay: the second step, recorded, runs no operation that brings a number to the host."""
    model = decoder(toy_model("llama"))
    seen: list[set[str]] = []

    def run(key: Hashable, step: Callable[[], None]) -> None:
        with torch.profiler.profile() as profile:
            step()
        seen.append({event.key for event in profile.key_averages()})

    memory = FixedMemory(model, lambda: run)
    drawn(model, prompt_rows(), 3, RESTRICTED, (1, 9), memory)
    brought = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::_unique2"}
    assert len(seen) == 2 and not brought & seen[1]


def test_buckets_are_at_most_half_as_large_again():
    buckets = sorted({bucket_of(n) for n in range(1, 257)})
    assert buckets[:8] == [1, 2, 3, 4, 6, 8, 12, 16] and buckets[-3:] == [128, 192, 256]
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(buckets))
    assert [bucket_of(n, 128) for n in (1, 128, 129, 257, 385, 513)] == [128, 128, 256, 384, 512, 768]


def test_models_whose_steps_need_the_host_are_not_captured():
    assert can_be_captured(toy_model("qwen3"))
    assert not can_be_captured(toy_model("qwen3_moe"))
