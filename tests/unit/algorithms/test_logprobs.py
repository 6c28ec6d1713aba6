import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.logprobs import (
    language_outputs,
    logprobs_and_entropy,
    packed_predicting_positions,
    sum_pi_squared,
    token_logprobs,
)
from tests.oracles import logprobs as oracle
from tests.unit.algorithms.examples import generator, normal, seeds

temperatures = st.sampled_from([0.25, 1.0, 1.7])
chunks = st.sampled_from([1, 3, 4, 100, None])


def example(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets."""
    logits = (3 * normal(shape, seed)).to(dtype)
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator(seed))


@given(seeds, temperatures, chunks, st.sampled_from([(4, 5), (2, 3, 7), (0, 5)]))
def test_values_and_gradients_match_the_whole_table(seed, temperature, chunk_tokens, shape):
    logits, targets = example(shape, seed)
    weights = normal((2, *shape[:-1]), seed + 1)
    logits.requires_grad_()
    outputs = logprobs_and_entropy(logits, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    expected = oracle.logprobs_and_entropy(logits, targets, temperature)
    for output, wanted, weight in zip(outputs, expected, weights, strict=True):
        assert output.dtype == torch.float32
        # float32 against float64, logits up to about 12 / 0.25
        torch.testing.assert_close(output.double(), wanted, atol=2e-5, rtol=1e-5)
        grad, wanted_grad = (
            torch.autograd.grad((x * weight).sum(), logits, retain_graph=True)[0] for x in (output, wanted)
        )
        torch.testing.assert_close(grad, wanted_grad, atol=1e-4, rtol=1e-4)


def test_the_gradient_flows_through_both_at_once():
    logits, targets = example((5, 6), 0)
    logits.requires_grad_()
    grads = []
    for function in (
        lambda: logprobs_and_entropy(logits, targets, temperature=0.7, chunk_tokens=2),
        lambda: oracle.logprobs_and_entropy(logits, targets, 0.7),
    ):
        logprobs, entropies = function()
        grads.append(torch.autograd.grad((logprobs.square() + logprobs * entropies).sum(), logits)[0])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


@given(seeds, temperatures, chunks)
def test_logprobs_are_bit_for_bit_the_same_with_and_without_entropy_and_for_any_chunk(seed, temperature, chunk_tokens):
    """The first ratio of an update is then exactly 1. Nor does their gradient depend on either."""
    logits, targets = example((6, 64), seed)
    logits.requires_grad_()
    alone = token_logprobs(logits, targets, temperature=temperature)
    both = logprobs_and_entropy(logits, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    assert torch.equal(alone, both[0])
    grads = [torch.autograd.grad(logprobs.square().sum(), logits)[0] for logprobs in (alone, both[0])]
    assert torch.equal(*grads)


def test_named_outputs_come_in_the_order_of_their_names():
    logits, targets = example((6, 9), 0)
    both = logprobs_and_entropy(logits, targets, temperature=0.7)
    found = language_outputs(logits, targets, ("entropy", "sum_pi_squared", "logprobs"), temperature=0.7)
    for output, wanted in zip(found, (both[1], sum_pi_squared(logits, temperature=0.7), both[0]), strict=True):
        assert torch.equal(output, wanted)
    (alone,) = language_outputs(logits, targets, ("logprobs",), temperature=0.7)
    assert torch.equal(alone, both[0])


def test_bfloat16_logits_are_computed_in_float32_and_get_a_bfloat16_gradient():
    logits, targets = example((4, 1000), 0, torch.bfloat16)
    logits.requires_grad_()
    logprobs = token_logprobs(logits, targets, temperature=1.0)
    torch.testing.assert_close(
        logprobs.double(), oracle.logprobs_and_entropy(logits, targets, 1.0)[0], atol=1e-5, rtol=0
    )
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_entropy_is_that_of_the_tempered_distribution():
    _, uniform = logprobs_and_entropy(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), temperature=3.0)
    torch.testing.assert_close(uniform, torch.full((2,), 8.0).log())
    _, certain = logprobs_and_entropy(torch.tensor([[1e4, 0.0]]), torch.tensor([0]), temperature=1.0)
    assert certain.item() == 0.0


def test_a_forbidden_token_leaves_values_and_gradients_finite():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = logprobs_and_entropy(logits, torch.tensor([0]), temperature=0.5)
    (logprobs + entropies).sum().backward()
    expected = oracle.logprobs_and_entropy(logits[:, :2], torch.tensor([0]), 0.5)
    torch.testing.assert_close((logprobs.double(), entropies.double()), expected)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0.0


def test_the_caller_keeps_its_logits():
    logits, targets = example((4, 5), 0)
    before = logits.clone()
    logits.requires_grad_()
    sum(x.sum() for x in logprobs_and_entropy(logits, targets, temperature=1.0)).backward()
    assert torch.equal(logits.detach(), before)


def test_no_float32_table_of_all_rows_is_made():
    """By the largest tensor that any operation returns: nothing of N x V but the gradient, in the logits' own dtype."""
    rows, vocabulary, chunk = 64, 512, 4
    logits, targets = example((rows, vocabulary), 0, torch.bfloat16)
    logits.requires_grad_()
    sizes: list[tuple[int, torch.dtype]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append((result.numel(), result.dtype))
            return result

    with Watch():
        logprobs, entropies = logprobs_and_entropy(logits, targets, temperature=0.7, chunk_tokens=chunk)
        (logprobs.sum() + entropies.sum()).backward()
    assert max(size for size, dtype in sizes if dtype == torch.float32) == chunk * vocabulary
    assert max(size for size, _ in sizes) == rows * vocabulary


ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5)


@given(ROWS)
def test_positions_are_one_before_each_response_token(lengths):
    prompts, responses = ([[0] * n for n in column] for column in zip(*lengths, strict=True))
    expected = oracle.response_positions(prompts, responses)
    prompt_lengths, response_lengths = (torch.tensor(column) for column in zip(*lengths, strict=True))
    row_tokens = int((prompt_lengths + response_lengths).max())
    starts = torch.arange(len(lengths)) * row_tokens
    flat = packed_predicting_positions(starts, prompt_lengths, response_lengths)
    assert flat.tolist() == [start + p for start, row in zip(starts.tolist(), expected, strict=True) for p in row]


def test_packed_rows_are_read_at_the_same_tokens_as_padded_ones():
    prompt_lengths, response_lengths = torch.tensor([3, 1]), torch.tensor([1, 3])
    stream = torch.tensor([10, 11, 12, 100, 20, 200, 201, 202])  # what stands at each packed position
    positions = packed_predicting_positions(torch.tensor([0, 4]), prompt_lengths, response_lengths)
    assert stream[positions + 1].tolist() == [100, 200, 201, 202]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_likelihoods_of_all_tokens_sum_to_one(temperature):
    logits = normal((1, 9), 0).expand(9, 9)
    assert token_logprobs(logits, torch.arange(9), temperature=temperature).exp().sum().item() == pytest.approx(1.0)


def test_the_sum_of_squares_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1e-30, 1e-30]]).log()
    assert sum_pi_squared(logits, temperature=1.0).tolist() == pytest.approx([0.375, 1.0])


@given(seeds, temperatures, chunks, st.sampled_from([(4, 5), (2, 3, 7), (0, 5)]))
def test_sums_of_squares_match_the_whole_table(seed, temperature, chunk_tokens, shape):
    logits, _ = example(shape, seed)
    found = sum_pi_squared(logits, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found.double(), oracle.sum_pi_squared(logits, temperature), atol=1e-6, rtol=1e-5)
