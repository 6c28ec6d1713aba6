import pytest
import torch

from hybridflow.algorithms.response_length import length_penalty, overlong_punishment
from tests.oracles.rewards import cost_of_length, overlong


@pytest.mark.parametrize(("longest", "buffer"), [(16, 4), (16, 16), (20480, 4096), (5, 1)])
def test_overlong_punishment_equals_the_papers_three_cases(longest, buffer):
    lengths = [*range(30), longest - buffer, longest - buffer + 1, longest - 1, longest, longest + 1]
    found = overlong_punishment(torch.tensor(lengths, dtype=torch.float32), max_tokens=longest, buffer_tokens=buffer)
    assert found.tolist() == pytest.approx([overlong(length, longest, buffer) for length in lengths])


@pytest.mark.parametrize("exact", [True, False])
def test_length_penalty_equals_the_oracle(exact):
    found = length_penalty(torch.arange(20.0), target=7, penalty=0.5, exact=exact)
    assert found.tolist() == [cost_of_length(length, 7, 0.5, exact) for length in range(20)]
