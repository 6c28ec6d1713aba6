"""Pairs and labeled responses as rows for a model."""

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.batch.iterate import ROWS_TOGETHER
from hybridflow.dataflows.kto import with_mismatched
from hybridflow.dataflows.pairs import rows_of_pairs
from hybridflow.errors import BatchError
from tests.toys import token_rows


def pairs(**rows) -> Batch:
    tokens = {"prompt_ids": token_rows([2, 3], seed=0), "chosen_ids": token_rows([4, 1], seed=1)}
    tokens["rejected_ids"] = token_rows([3, 5], seed=2)
    return Batch.of(rows={"uid": torch.tensor([7, 9]), "margin": torch.tensor([0.0, 2.0])} | rows, tokens=tokens)


def labeled(count: int) -> Batch:
    lengths = list(range(1, count + 1))
    tokens = {"prompt_ids": token_rows(lengths, seed=0), "response_ids": token_rows(lengths, seed=1)}
    return Batch.of(rows={"uid": torch.arange(count), "is_chosen": torch.arange(count) % 2 == 0}, tokens=tokens)


def test_the_chosen_response_stands_before_the_rejected_one():
    given, rows = pairs(), rows_of_pairs(pairs())
    assert rows.row("uid").tolist() == [7, 7, 9, 9]
    assert rows.row("is_chosen").tolist() == [True, False, True, False]
    assert rows.row("margin").tolist() == [0.0, 0.0, 2.0, 2.0]
    assert rows.meta[ROWS_TOGETHER] == 2
    responses, prompts = rows.tokens("response_ids"), rows.tokens("prompt_ids")
    for row in range(2):
        assert torch.equal(responses.row(2 * row), given.tokens("chosen_ids").row(row))
        assert torch.equal(responses.row(2 * row + 1), given.tokens("rejected_ids").row(row))
        for both in (2 * row, 2 * row + 1):
            assert torch.equal(prompts.row(both), given.tokens("prompt_ids").row(row))
    assert torch.equal(rows.tokens("response_mask").lengths, responses.lengths)
    assert bool((rows.tokens("response_mask").values == 1).all())


def test_reference_sums_go_with_their_responses():
    rows = rows_of_pairs(pairs(ref_sums=torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])))
    assert rows.row("ref_sums").tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert "ref_sums" not in rows_of_pairs(pairs())


def test_a_mismatched_response_is_that_of_another_row():
    given, rows = labeled(3), with_mismatched(labeled(3))
    assert rows.row("is_mismatched").tolist() == [False, True] * 3
    assert rows.row("is_chosen").tolist() == [True, True, False, False, True, True]
    for row in range(3):
        own, other = rows.tokens("response_ids").row(2 * row), rows.tokens("response_ids").row(2 * row + 1)
        assert torch.equal(own, given.tokens("response_ids").row(row))
        assert torch.equal(other, given.tokens("response_ids").rows()[row - 1])


def test_a_mismatched_response_is_not_the_other_one_of_a_pair_taken_apart():
    for count in (4, 6, 8):
        given, rows = labeled(count), with_mismatched(labeled(count))
        places = {tuple(ids.tolist()): row // 2 for row, ids in enumerate(given.tokens("response_ids").rows())}
        mismatched = rows.tokens("response_ids").rows()[1::2]
        assert all(places[tuple(ids.tolist())] != row // 2 for row, ids in enumerate(mismatched))


def test_a_mismatched_response_may_be_given_with_its_reference():
    others, sums = token_rows([2, 2, 2], seed=3), torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    rows = with_mismatched(labeled(3).with_columns(rows={"ref_sums": sums}, tokens={"mismatched_ids": others}))
    assert rows.row("ref_sums").tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    found, expected = rows.tokens("response_ids").rows()[1::2], others.rows()
    assert all(torch.equal(mine, given) for mine, given in zip(found, expected, strict=True))
    assert "mismatched_ids" not in rows


def test_one_response_has_none_to_be_mismatched_with():
    with pytest.raises(BatchError, match=r"only one response.*data\.batch_size to 2"):
        with_mismatched(labeled(1))
