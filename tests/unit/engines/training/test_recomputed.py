"""Work in chunks that are done again in the backward pass."""

import pytest
import torch

from hybridflow.engines.training.outputs import chunk_tokens_of, recomputed_in_chunks

CHUNKS = [1, 3, 7, 8, 100]


def example():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.arange(8) % 5


def counted(head):
    """A function of tokens, and the number of tokens of each of its calls."""
    calls = []

    def function(hidden, targets):
        calls.append(len(hidden))
        table = torch.log_softmax(hidden @ head.T, 1)
        return table.gather(1, targets[:, None]).squeeze(1), table.exp().square().sum(1)

    return function, calls


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_outputs_and_gradients_are_those_of_one_piece(chunk_tokens):
    hidden, head, targets = example()
    function, _ = counted(head)
    found = recomputed_in_chunks(function, hidden, targets, chunk_tokens=chunk_tokens)
    expected = function(hidden, targets)
    for output, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(output, wanted)
    grads, wanted_grads = (
        torch.autograd.grad((first * second).sum(), (hidden, head)) for first, second in (found, expected)
    )
    torch.testing.assert_close(grads, wanted_grads)


@pytest.mark.parametrize(
    ("chunk_tokens", "with_gradient", "expected"),
    [(8, True, [8]), (3, True, [3, 3, 2, 2, 3, 3]), (3, False, [3, 3, 2])],
)
def test_only_several_chunks_are_done_again_for_a_gradient(chunk_tokens, with_gradient, expected):
    hidden, head, targets = example()
    function, calls = counted(head)
    with torch.set_grad_enabled(with_gradient):
        outputs = recomputed_in_chunks(function, hidden, targets, chunk_tokens=chunk_tokens)
    if with_gradient:
        sum(output.sum() for output in outputs).backward()
    assert calls == expected


def test_no_tokens_are_one_empty_chunk():
    hidden, head, targets = example()
    outputs = recomputed_in_chunks(counted(head)[0], hidden[:0], targets[:0], chunk_tokens=3)
    assert [len(output) for output in outputs] == [0, 0]


def test_a_chunk_has_at_least_one_token():
    assert chunk_tokens_of(1 << 40, torch.device("cpu")) == 1
    assert chunk_tokens_of(1 << 20, torch.device("cpu")) == 64
