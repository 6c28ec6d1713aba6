"""The largest numbers of a batch that lies in parts, and numbers that are drawn for tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.selection import among_largest, hashed_draws
from tests.unit.algorithms.examples import generator, masks, normal, seeds, shapes, token_mask
from tests.unit.algorithms.fake_ranks import on_ranks


def selected_in_parts(values, mask, count, parts):
    """The selection on several ranks, put together."""

    def program(rows):
        return lambda reduce: among_largest(values[rows], mask[rows].bool(), count, reduce=reduce)

    return torch.cat(on_ranks([program(rows) for rows in torch.arange(len(values)).split(parts)]))


def expected(values, mask, count):
    """Every candidate that fewer than `count` others are larger than."""
    candidates = values[mask.bool()].tolist()
    return [
        [bool(keep) and sum(other > value for other in candidates) < count for value, keep in zip(*row, strict=True)]
        for row in zip(values.tolist(), mask.tolist(), strict=True)
    ]


@given(shapes, seeds, masks, st.integers(1, 12))
def test_the_largest_are_those_that_few_others_exceed(shape, seed, kind, count):
    values, mask = 100 * normal(shape, seed), token_mask(shape, kind, seed + 1)
    found = among_largest(values, mask.bool(), count, reduce=lambda tensor: tensor)
    assert found.tolist() == expected(values, mask, count)


@pytest.mark.parametrize("parts", [[6], [1, 5], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("count", [1, 4, 100])
def test_the_selection_does_not_depend_on_the_ranks(parts, count):
    values, mask = normal((6, 5), 0), token_mask((6, 5), "holes", 1)
    mask[0] = 0.0  # one rank has no candidate at all
    assert selected_in_parts(values, mask, count, parts).tolist() == expected(values, mask, count)


def test_equal_numbers_are_taken_together_and_signs_count():
    values = torch.tensor([[-1.0, 2.0, 2.0, -0.0, 0.0, -3.0]])
    every = torch.ones(1, 6).bool()
    picked = [among_largest(values, every, count, reduce=lambda tensor: tensor)[0].tolist() for count in (1, 3, 5)]
    assert picked[0] == [False, True, True, False, False, False]
    assert picked[1] == [False, True, True, True, True, False]
    assert picked[2] == [True, True, True, True, True, False]


def sequences(seed):
    ids = torch.randint(1, 50, (200, 9), generator=generator(seed))
    lengths = torch.randint(1, 10, (200,), generator=generator(seed + 1))
    return ids * (torch.arange(9) < lengths[:, None])


def test_draws_belong_to_the_sequence_whatever_stands_beside_it():
    prompts, responses = sequences(0), sequences(5)
    whole = hashed_draws(prompts, responses)
    wider = [torch.nn.functional.pad(column[:7], (0, 4)) for column in (prompts, responses)]
    assert torch.equal(hashed_draws(*wider)[:, :9], whole[:7])
    assert not torch.equal(whole, hashed_draws(prompts.roll(1, 0), responses))


def test_draws_are_spread_evenly_and_independent_of_each_other():
    draws = hashed_draws(sequences(0), sequences(5))
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    counts = torch.histc(draws, 10, 0.0, 1.0)
    # 180 a bin, standard deviation 12.7: five of them.
    assert float((counts - 180).abs().max()) < 64
    neighbors = torch.corrcoef(torch.stack([draws[:, :-1].flatten(), draws[:, 1:].flatten()]))
    # 1600 pairs: standard deviation 0.025, five of them.
    assert abs(float(neighbors[0, 1])) < 0.125
