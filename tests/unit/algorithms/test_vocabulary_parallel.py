"""Logits in ranges of the vocabulary, one a rank: the same numbers as from the whole table."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms.vocabulary_parallel import vocabulary_parallel_outputs
from tests.oracles import logprobs as oracle
from tests.spmd import run_ranks
from tests.unit.algorithms.examples import generator, normal

ROWS, VOCABULARY = 7, 11


def example(scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets in every range, and a weight for each output."""
    logits = scale * normal((ROWS, VOCABULARY), 0)
    targets = torch.tensor([0, 10, 5, 6, 3, 7, 10])
    return logits, targets, normal((2, ROWS), 1)


def divided(rank: int, columns: int, temperature: float, chunk_tokens: int | None, scale: float):
    """All outputs, and the gradient of a loss of the first two, from `columns` columns per rank: the last are padding.

    On the way, log-probabilities alone and their gradient must be bit for bit those beside the others.
    """
    logits, targets, weights = example(scale)
    width = columns * dist.get_world_size()
    # What stands in padding must not matter.
    padded = torch.cat([logits, torch.full((ROWS, width - VOCABULARY), 50.0)], 1)
    own = padded[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()

    def outputs_of(*names: str) -> tuple[torch.Tensor, ...]:
        return vocabulary_parallel_outputs(
            own,
            targets,
            names,
            temperature=temperature,
            first_column=rank * columns,
            vocabulary=VOCABULARY,
            group=dist.group.WORLD,
            chunk_tokens=chunk_tokens,
        )

    *outputs, squares = outputs_of("logprobs", "entropy", "sum_pi_squared")
    (alone,) = outputs_of("logprobs")
    assert torch.equal(alone, outputs[0])
    grads = [torch.autograd.grad(each.square().sum(), own, retain_graph=True)[0] for each in (alone, outputs[0])]
    assert torch.equal(*grads)
    loss = sum((output.square() * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    (grad,) = torch.autograd.grad(loss, own)
    return [tensor.detach().numpy() for tensor in (*outputs, grad, squares)]


def expected(temperature: float, scale: float):
    logits, targets, weights = example(scale)
    logits.requires_grad_()
    outputs = oracle.logprobs_and_entropy(logits, targets, temperature)
    loss = sum((output.square() * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return (*(output.detach() for output in outputs), torch.autograd.grad(loss, logits)[0])


@pytest.mark.parametrize(
    ("num_ranks", "columns", "temperature", "chunk_tokens", "scale"),
    [
        (2, 6, 1.0, None, 3.0),
        (2, 6, 0.7, 3, 3.0),
        (2, 11, 1.0, 1, 3.0),  # the second rank has padding alone
        (3, 5, 1.7, 2, 30.0),  # ranks whose whole range is far below the highest logit
    ],
)
def test_values_and_gradients_are_those_of_the_whole_table(num_ranks, columns, temperature, chunk_tokens, scale):
    answers = run_ranks(divided, num_ranks, columns, temperature, chunk_tokens, scale)
    logprobs, entropies, grad = expected(temperature, scale)
    for answer in answers:
        found = [torch.from_numpy(array) for array in answer]
        # float32 against float64, logits up to about 60
        torch.testing.assert_close(found[0].double(), logprobs.double(), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found[1].double(), entropies.double(), atol=2e-5, rtol=1e-5)
        squares = oracle.sum_pi_squared(example(scale)[0], temperature)
        torch.testing.assert_close(found[3].double(), squares, atol=1e-6, rtol=1e-5)
    whole = torch.cat([torch.from_numpy(answer[2]) for answer in answers], 1)
    torch.testing.assert_close(whole[:, :VOCABULARY], grad, atol=2e-4, rtol=1e-4)
    assert (whole[:, VOCABULARY:] == 0.0).all()


def alone(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes = {"first_column": 0, "vocabulary": logits.shape[1]}
    return vocabulary_parallel_outputs(logits, targets, ("logprobs", "entropy"), temperature=0.7, **sizes, group=None)


def test_bfloat16_logits_are_computed_in_float32_and_get_a_bfloat16_gradient():
    logits = normal((4, 1000), 0).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 1000, (4,), generator=generator(0))
    logprobs, entropies = alone(logits, targets)
    wanted = oracle.logprobs_and_entropy(logits, targets, 0.7)
    torch.testing.assert_close((logprobs.double(), entropies.double()), wanted, atol=1e-5, rtol=0)
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16


def test_an_impossible_token_leaves_the_other_gradients_finite():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = alone(logits, torch.tensor([0]))
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0.0


def test_no_rows_are_no_numbers():
    logprobs, entropies = alone(torch.empty(0, 5), torch.empty(0, dtype=torch.int64))
    assert logprobs.shape == entropies.shape == (0,)
