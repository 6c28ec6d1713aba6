"""What models say of a microbatch's response tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config

from hybridflow.engines.training.microbatch import make_microbatches
from hybridflow.engines.training.outputs import LanguageOutputs, chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.packed_attention import use_packed_attention
from tests.oracles import training as oracle
from tests.toys import TEMPERATURE, VOCABULARY, sequences, toy_model

CPU = torch.device("cpu")


def capped_model():
    """Logits are capped softly, and the head is the embedding."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15}
    config = Gemma2Config(**sizes, **heads, final_logit_softcapping=2.0, attn_logit_softcapping=None, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def asked(model, micro, **settings):
    """Outputs of a microbatch, and the gradient of all parameters for a loss of both outputs."""
    use_packed_attention(model)
    model.zero_grad()
    outputs = LanguageOutputs(model, **settings)(micro, ("logprobs", "entropy"), TEMPERATURE)
    (outputs["logprobs"] * torch.linspace(-1, 1, len(micro.targets)) + 0.3 * outputs["entropy"]).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {name: flat.detach() for name, flat in outputs.items()}, grads


@pytest.mark.parametrize(
    "make", [lambda: toy_model("llama"), lambda: toy_model("qwen3", tie_word_embeddings=True), capped_model]
)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 20])
def test_a_head_in_chunks_gives_the_same(make, chunk_tokens):
    model = make()
    (micro,) = make_microbatches(sequences(), budget_tokens=100, device=CPU)
    (found, grads), (expected, wanted) = asked(model, micro, chunk_tokens=chunk_tokens), asked(model, micro)
    for name in expected:
        # Measured 1.4e-6: a product by one row is summed in another order than by many.
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    for name, grad in grads.items():
        # Products over fewer tokens at a time, then added: float32.
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max()))


def test_logits_that_are_capped_are_the_models_own():
    batch, model = sequences(), capped_model()
    expected = [oracle.response_logprobs(model, row, 0.7)[0] for row in oracle.rows_of(batch)]
    (micro,) = make_microbatches(batch, budget_tokens=100, device=CPU)
    found, _ = asked(model, micro)
    wanted = torch.cat([expected[row] for row in micro.rows.tolist()])
    torch.testing.assert_close(found["logprobs"], wanted, rtol=0, atol=1e-5)


class Watched(TorchDispatchMode):
    """The most rows of a table of the whole vocabulary that any operation returns (the head has 64), and how many
    exponentials of such tables are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.exponentials = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == 1000 and result.shape[0] != 64:
            self.rows = max(self.rows, result.shape[0])
            self.exponentials += "exp" in func.name()
        return result


@pytest.mark.parametrize(("chunk_tokens", "rows"), [(4, 4), (None, 21)])
def test_logits_are_held_for_one_chunk_alone(chunk_tokens, rows):
    (micro,) = make_microbatches(sequences(), budget_tokens=100, device=CPU)
    with Watched() as watched:
        asked(toy_model("llama", vocab_size=1000), micro, chunk_tokens=chunk_tokens)
    assert watched.rows == rows


@pytest.mark.parametrize(("names", "forward"), [(("logprobs",), 0), (("logprobs", "entropy"), 1)])
def test_the_entropy_costs_nothing_where_it_is_not_named(names, forward):
    model = toy_model("llama", vocab_size=1000)
    use_packed_attention(model)
    (micro,) = make_microbatches(sequences(), budget_tokens=100, device=CPU)
    with Watched() as watched:
        outputs = LanguageOutputs(model)(micro, names, TEMPERATURE)
        assert tuple(outputs) == names
        assert watched.exponentials == forward
        outputs["logprobs"].sum().backward()
    assert watched.exponentials == forward + 1, "the probabilities alone, for the gradient"


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "with_gradient", "expected"),
    [(8, 8, True, [8]), (8, 3, True, [3, 3, 2, 2, 3, 3]), (8, 3, False, [3, 3, 2]), (0, 3, True, [0])],
)
def test_only_several_chunks_are_done_again_for_a_gradient(tokens, chunk_tokens, with_gradient, expected):
    hidden, calls = torch.randn(tokens, 4, requires_grad=True), []

    def function(hidden):
        calls.append(len(hidden))
        return (hidden.square().sum(1),)

    with torch.set_grad_enabled(with_gradient):
        (output,) = recomputed_in_chunks(function, hidden, chunk_tokens=chunk_tokens)
    if with_gradient:
        output.sum().backward()
    assert calls == expected and len(output) == tokens


def test_a_chunk_has_at_least_one_token():
    assert chunk_tokens_of(1 << 40, CPU) == 1
    assert chunk_tokens_of(1 << 20, CPU) == 64
