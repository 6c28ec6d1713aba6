"""From ragged rows to rectangles and back."""

import torch

from hybridflow.batch import Batch
from hybridflow.engines.training.microbatch import columns_of, make_microbatches
from tests.oracles.logprobs import response_positions
from tests.toys import sequences

CPU = torch.device("cpu")


def micros(batch: Batch, budget: int):
    return list(make_microbatches(batch, budget_tokens=budget, pad_token_id=0, device=CPU))


def test_rectangles_hold_prompt_then_response_then_padding_without_the_column_that_predicts_nothing():
    batch = sequences((2, 1), (1, 3))
    (micro,) = micros(batch, 100)
    prompts, responses = batch.tokens("prompt_ids"), batch.tokens("response_ids")
    for position, row in enumerate(micro.rows.tolist()):
        whole = prompts.row(row).tolist() + responses.row(row).tolist()
        assert micro.input_ids[position].tolist() == (whole + [0] * (4 - len(whole)))[:3]


def test_each_response_token_is_predicted_by_the_position_before_it():
    batch = sequences()
    for micro in micros(batch, 25):
        part = batch.select(micro.rows)
        prompts, responses = ([row.tolist() for row in part.tokens(n).rows()] for n in ("prompt_ids", "response_ids"))
        width = micro.input_ids.shape[1]
        expected = [
            row * width + position
            for row, positions in enumerate(response_positions(prompts, responses))
            for position in positions
        ]
        assert micro.predicts.tolist() == expected
        assert torch.equal(micro.targets, part.tokens("response_ids").values)


def test_spread_puts_each_token_in_its_place_and_zeros_elsewhere():
    batch = sequences()
    for micro in micros(batch, 25):
        expected = batch.select(micro.rows).tokens("response_ids").padded(0)
        assert torch.equal(micro.spread(micro.targets), expected)


def test_columns_are_padded_to_the_same_rectangle():
    batch = sequences()
    for micro in micros(batch, 25):
        columns = columns_of(batch, micro, CPU)
        assert "prompt_ids" not in columns
        assert columns["response_mask"].shape == micro.shape
        assert torch.equal(columns["response_ids"], micro.spread(micro.targets))
        assert torch.equal(columns["uid"], batch.row("uid")[micro.rows])
