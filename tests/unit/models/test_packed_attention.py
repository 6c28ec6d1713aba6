"""Packed sequences against each sequence alone, by transformers' own attention."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertConfig, FalconConfig, Gemma2Config, GptOssConfig, MambaConfig

from hybridflow.errors import EngineError
from hybridflow.models import packed_attention as attention_module
from hybridflow.models.heads import packed_hidden_states
from hybridflow.models.packed_attention import packed_attention, use_packed_attention
from hybridflow.models.packing import Packing
from tests.toys import VOCABULARY, toy_model

CPU = torch.device("cpu")
LENGTHS = (9, 2, 7, 1, 9, 4)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def other_model(config_class, **changes):
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **HEADS, **TOKENS, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def hidden_and_gradients(model, hidden):
    """Hidden states, and the gradients of a sum of them in which every entry has its own weight."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(6))
    model.zero_grad()
    (hidden.float() * weights).sum().backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach().float(), grads


def alone(model, implementation: str = "eager"):
    model.set_attn_implementation(implementation)
    rows = [model.get_decoder()(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in tokens()]
    return hidden_and_gradients(model, torch.cat(rows))


def packed(model):
    assert use_packed_attention(model)
    hidden = packed_hidden_states(model, torch.cat(tokens()), Packing(LENGTHS, CPU))
    return hidden_and_gradients(model, hidden)


def check_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        scale = float(expected[1][name].abs().max())
        torch.testing.assert_close(grad, expected[1][name], rtol=0, atol=1e-5 * max(1.0, scale), msg=name)


MODELS = {
    **{architecture: partial(toy_model, architecture) for architecture in ("llama", "qwen2", "qwen3", "qwen3_moe")},
    **{f"window {size}": partial(toy_model, "mistral", sliding_window=size) for size in (1, 3, 8, 100)},
    "alternating windows, capped": partial(other_model, Gemma2Config, sliding_window=3, attn_logit_softcapping=2.0),
    "sinks": partial(other_model, GptOssConfig, sliding_window=3, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_hidden_states_and_gradients_are_those_of_each_sequence_alone(make):
    model = make()
    check_same(packed(model), alone(model))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_in_bfloat16_packed_sequences_are_as_near_to_float32_as_sequences_alone(architecture):
    model = toy_model(architecture)
    hidden, grads = alone(model)
    model = model.to(torch.bfloat16)
    near, own = packed(model), alone(model, "sdpa")

    def distance(found, expected):
        return float((found - expected).norm())

    assert distance(near[0], hidden) < 1.2 * distance(own[0], hidden)
    for name, grad in grads.items():
        # Sums over all tokens at once or over each sequence: rounded differently, neither better.
        assert distance(near[1][name], grad) < 1.5 * distance(own[1][name], grad) + 1e-3 * float(grad.norm()), name


def plain(query, key, value, lengths, window):
    """Attention by its definition, one sequence and one query at a time."""
    rows, groups, start = [], query.shape[1] // key.shape[1], 0
    for length in lengths:
        for position in range(start, start + length):
            seen = slice(max(start, position + 1 - window), position + 1)
            k, v = (part[seen].repeat_interleave(groups, 1) for part in (key, value))
            weights = torch.softmax((query[position] * k).sum(-1) * 0.3, 0)
            rows.append((weights[..., None] * v).sum(0))
        start += length
    return torch.stack(rows)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), st.sampled_from([2, 5, 1000]))
def test_blocks_give_attention_by_its_definition_in_any_order_of_lengths(lengths, window):
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    slope = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    found = packed_attention(*parts, Packing(tuple(lengths), CPU), scaling=0.3, window=window)
    expected = plain(*parts, lengths, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, parts, slope), torch.autograd.grad(expected, parts, slope))


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_mask_over_all_tokens_is_made():
    model = toy_model("mistral", sliding_window=3)
    assert use_packed_attention(model)
    lengths = (8,) * 100
    with Largest() as largest, torch.no_grad():
        packed_hidden_states(model, torch.cat(tokens(lengths)), Packing(lengths, CPU))
    # The widest activation is that of the MLP, 128 a token.
    assert largest.elements == 800 * 128


@pytest.mark.parametrize("config_class", [FalconConfig, MambaConfig])
def test_models_with_attention_of_their_own_or_none_are_padded_and_as_exact(config_class):
    torch.manual_seed(0)
    config = config_class(**SIZES, **TOKENS, num_attention_heads=4, initializer_range=0.15)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert not use_packed_attention(model)
    found = packed_hidden_states(model, torch.cat(tokens()), Packing(LENGTHS, CPU))
    rows = [model.get_decoder()(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in tokens()]
    check_same(hidden_and_gradients(model, found), hidden_and_gradients(model, torch.cat(rows)))


def test_a_model_that_sees_later_tokens_is_refused():
    model = other_model(BertConfig)
    assert use_packed_attention(model)
    with pytest.raises(EngineError, match="attends to later tokens.*causal"):
        packed_hidden_states(model, torch.cat(tokens()), Packing(LENGTHS, CPU))


def test_a_call_without_boundaries_or_with_a_mask_is_refused():
    model = toy_model("llama")
    use_packed_attention(model)
    ids, mask = torch.tensor([[5, 6, 7]]), torch.zeros(1, 1, 3, 3)
    with pytest.raises(EngineError, match="without the boundaries.*set_attn_implementation"):
        model(input_ids=ids)
    with pytest.raises(EngineError, match="does not support: attention_mask"):
        model.get_decoder()(ids, attention_mask=mask, packing=Packing((3,), CPU), use_cache=False)


def test_the_implementation_is_not_saved_with_the_model(tmp_path):
    model = toy_model("llama")
    use_packed_attention(model)
    model.save_pretrained(tmp_path)
    assert "hybridflow" not in (tmp_path / "config.json").read_text()


def test_flash_attention_is_given_fewer_key_value_heads_than_queries(monkeypatch):
    """torch's kernel needs a GPU; what it is called with does not."""
    called = {}

    def kernel(query, key, value, *ends, scale, window_size, **more):
        called.update(heads=(query.shape[1], key.shape[1], value.shape[1]), window=window_size, more=more)
        return query

    monkeypatch.setattr(attention_module, "varlen_attn", kernel)
    monkeypatch.setattr(attention_module, "_flash_can", lambda query, value: True)
    query, key, value = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    packed_attention(query, key, value, Packing((3, 5), CPU), window=2)
    assert called["window"] == (1, 0)
    assert called["heads"] == (4, 2, 2)
    assert called["more"] == {"enable_gqa": True}
