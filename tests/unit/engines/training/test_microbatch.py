"""From ragged rows to sequences end to end, and to the rectangles of loss functions."""

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.engines.training.microbatch import columns_of, make_microbatches
from tests.oracles.logprobs import response_positions
from tests.toys import sequences

CPU = torch.device("cpu")


def micros(batch: Batch, budget: int, **settings: int):
    return make_microbatches(batch, budget_tokens=budget, device=CPU, **settings)


def whole_rows(batch: Batch, rows: torch.Tensor) -> list[list[int]]:
    part = batch.select(rows)
    prompts, responses = part.tokens("prompt_ids").rows(), part.tokens("response_ids").rows()
    return [prompt.tolist() + response.tolist() for prompt, response in zip(prompts, responses, strict=True)]


@pytest.mark.parametrize("budget", [1, 25, 100])
def test_sequences_stand_end_to_end_without_the_token_that_predicts_nothing(budget):
    batch = sequences()
    for micro in micros(batch, budget):
        kept = [row[:-1] for row in whole_rows(batch, micro.rows)]
        assert micro.input_ids.tolist() == [token for row in kept for token in row]
        assert micro.packing.position_ids.tolist() == [position for row in kept for position in range(len(row))]
        assert micro.packing.cu_seqlens.tolist() == [sum(len(row) for row in kept[:i]) for i in range(len(kept) + 1)]
        assert micro.packing.cu_seqlens.dtype is torch.int32
        assert micro.packing.max_seqlen == max(len(row) for row in kept)


def test_each_response_token_is_predicted_by_the_position_before_it():
    batch = sequences()
    for micro in micros(batch, 25):
        part = batch.select(micro.rows)
        prompts, responses = ([row.tolist() for row in part.tokens(n).rows()] for n in ("prompt_ids", "response_ids"))
        expected = [
            int(micro.packing.cu_seqlens[row]) + position
            for row, positions in enumerate(response_positions(prompts, responses))
            for position in positions
        ]
        assert micro.predicts.tolist() == expected
        assert torch.equal(micro.targets, part.tokens("response_ids").values)


@pytest.mark.parametrize("budget", [1, 100])
def test_a_fork_is_a_sequence_of_its_own(budget):
    batch = sequences((3, 1, 2), (9, 4, 8)).with_columns(tokens={"fork_starts": Ragged.from_rows([[4], [], [2, 5]])})
    lengths = {0: (7, 4), 1: (4,), 2: (4, 3, 2)}  # the last token of a row predicts nothing
    for micro in micros(batch, budget):
        assert micro.packing.lengths == tuple(length for row in micro.rows.tolist() for length in lengths[row])
        assert torch.equal(micro.targets, batch.select(micro.rows).tokens("response_ids").values)


def test_a_row_of_one_token_predicts_nothing():
    (micro,) = micros(sequences((1, 2), (0, 3)), 100)
    assert micro.packing.lengths == (4, 0)
    assert micro.lengths.tolist() == [3, 0]
    assert micro.predicts.tolist() == [1, 2, 3]


@pytest.mark.parametrize("multiple_of", [1, 4, 16])
def test_a_dummy_sequence_fills_up_and_nothing_reads_it(multiple_of):
    batch = sequences()
    for plain, micro in zip(micros(batch, 25), micros(batch, 25, multiple_of=multiple_of), strict=True):
        real = len(plain.input_ids)
        assert len(micro.input_ids) % multiple_of == 0
        assert len(micro.input_ids) - real < multiple_of
        assert torch.equal(micro.input_ids[:real], plain.input_ids)
        assert torch.equal(micro.predicts, plain.predicts)
        assert torch.equal(micro.packing.cu_seqlens[: len(plain.packing.cu_seqlens)], plain.packing.cu_seqlens)
        assert int(micro.packing.cu_seqlens[-1]) == len(micro.input_ids)


def test_micro_batches_that_do_not_count_follow_until_there_are_enough():
    parts = micros(sequences(), 25, at_least=6, multiple_of=4)
    real = micros(sequences(), 25, multiple_of=4)
    assert [micro.counts for micro in parts] == [True] * len(real) + [False] * (6 - len(real))
    assert all(len(micro.input_ids) == 4 for micro in parts[len(real) :])
    assert micros(sequences(), 25, at_least=1, multiple_of=4)[-1].counts


def test_rows_whose_responses_are_empty_still_have_a_column():
    batch = sequences(responses=(0, 3, 0, 2, 1))
    for micro in micros(batch, 1):
        mask = columns_of(batch, micro, CPU)["response_mask"]
        assert mask.shape == micro.shape == (1, max(1, int(micro.lengths)))
        assert float(mask.sum()) <= int(micro.lengths)


def test_columns_and_tokens_are_padded_to_the_same_rectangle():
    batch = sequences()
    for micro in micros(batch, 25):
        columns = columns_of(batch, micro, CPU)
        assert "prompt_ids" not in columns
        assert columns["response_mask"].shape == micro.shape
        assert torch.equal(columns["response_ids"], batch.select(micro.rows).tokens("response_ids").padded(0))
        assert torch.equal(columns["response_ids"], micro.spread(micro.targets))
        assert torch.equal(columns["uid"], batch.row("uid")[micro.rows])
