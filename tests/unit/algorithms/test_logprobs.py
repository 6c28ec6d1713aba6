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
    grads = []
    for logprobs, entropies in (outputs, expected):
        loss = (weights[0] * logprobs + weights[1] * entropies).sum()
        grads.append(torch.autograd.grad(loss, logits)[0])
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32
        # float32 against float64, logits up to about 12 / 0.25
        torch.testing.assert_close(output.double(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


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


@given(seeds, st.integers(0, 1))
def test_an_output_that_is_in_no_loss_does_not_change_the_gradient(seed, trained):
    """Bit for bit the gradient that the other output has with zero weight on it."""
    logits, targets = example((5, 7), seed)
    logits.requires_grad_()
    outputs = logprobs_and_entropy(logits, targets, temperature=1.0, chunk_tokens=2)
    weights = normal((5,), seed + 1)
    alone = torch.autograd.grad((weights * outputs[trained]).sum(), logits, retain_graph=True)[0]
    both = torch.autograd.grad((weights * outputs[trained] + 0 * outputs[1 - trained]).sum(), logits)[0]
    assert torch.equal(alone, both)


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


@given(seeds, temperatures, chunks, st.sampled_from([(4, 5), (2, 3, 7), (0, 5)]))
def test_sums_of_squares_match_the_whole_table(seed, temperature, chunk_tokens, shape):
    logits, _ = example(shape, seed)
    found = sum_pi_squared(logits, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found.double(), oracle.sum_pi_squared(logits, temperature), atol=1e-6, rtol=1e-5)
