import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch, Ragged
from hybridflow.config.data import Data
from hybridflow.data.loader import BatchStream, training_stream
from hybridflow.data.order import Epochs
from hybridflow.errors import DataError


def table(rows, start=0, **objects):
    numbers = list(range(start, start + rows))
    ids = Ragged.from_rows([[row] * (1 + row % 3) for row in numbers], torch.int64)
    return Batch.of(tokens={"prompt_ids": ids}, objects={"answer": numbers} | objects)


def loader(rows, batch_size, *, seed=0, shuffle=True):
    return BatchStream(table(rows), batch_size, Epochs(rows, seed, shuffle=shuffle))


def drawn(source, batches):
    """The rows and the uids of some batches."""
    found = [source.next() for _ in range(batches)]
    return [row for batch in found for row in batch.object("answer")], [u for b in found for u in b.row("uid").tolist()]


SIZES = st.integers(1, 12).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batches=st.integers(1, 20), seed=st.integers(0, 5), shuffle=st.booleans())
def test_each_epoch_holds_each_row_once_and_uids_are_the_positions(sizes, batches, seed, shuffle):
    rows, batch_size = sizes
    source = loader(rows, batch_size, seed=seed, shuffle=shuffle)
    assert source.epoch == 0
    found, uids = drawn(source, batches)
    assert uids == list(range(batches * batch_size))
    assert source.epoch == batches * batch_size // rows
    for start in range(0, len(found) - rows + 1, rows):
        assert sorted(found[start : start + rows]) == list(range(rows))


def test_columns_of_a_row_stay_together_and_peeking_does_not_advance():
    source = loader(7, 4, seed=3)
    peeked, batch = source.peek(), source.next()
    assert sorted(source.columns) == sorted(batch.columns) == ["answer", "prompt_ids", "uid"]
    assert peeked.object("answer") == batch.object("answer") and source.state()["position"] == 4
    for answer, ids in zip(batch.object("answer"), batch.tokens("prompt_ids").rows(), strict=True):
        assert ids.tolist() == [answer] * (1 + answer % 3)


def test_the_order_follows_from_seed_and_epoch_and_is_the_same_for_good():
    """Runs resumed under another version must see the same prompts; a change here breaks them."""
    assert Epochs(8, 0, shuffle=True).rows(0, 8).tolist() == [1, 6, 7, 0, 5, 3, 2, 4]
    epochs = [Epochs(50, seed, shuffle=True).rows(start, start + 50) for seed in (0, 1) for start in (0, 50)]
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_a_stream_of_more_rows_goes_on_where_the_position_is_in_their_order():
    before = loader(4, 2, shuffle=False)
    drawn(before, 3)
    for batch_size, batches in ((2, 2), (4, 1)):  # the size of a batch may change, too
        resumed = loader(5, batch_size, shuffle=False)
        resumed.restore(before.state())
        assert drawn(resumed, batches) == ([1, 2, 3, 4], [6, 7, 8, 9])
        assert resumed.epoch == 2


@pytest.mark.parametrize("batch_size", [0, 6])
def test_a_batch_larger_than_the_data_is_an_error(batch_size):
    with pytest.raises(DataError, match=rf"data.batch_size={batch_size}, but the data has 5 rows.*between 1 and 5"):
        loader(5, batch_size)


def stream(**settings):
    """Batches of 3 of the 5 + 3 rows of two files."""
    data = Data(train_files=["a.jsonl", "b.jsonl"], batch_size=3, **settings)
    return training_stream([table(5, level=[3, 1, 2, 5, 4]), table(3, 5, level=[3, 1, 2])], data, seed=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle": False},
        {"mixture": [0.9, 0.1]},
        {"difficulty_key": "level"},
        {"difficulty_key": "level", "curriculum_steps": 3},
        {"difficulty_key": "level", "mixture": [0.5, 0.5]},
    ],
)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_every_stream_goes_on_as_if_it_had_never_stopped(settings, before):
    whole, resumed = stream(**settings), stream(**settings)
    drawn(whole, before)
    resumed.restore(whole.state())
    rows, uids = drawn(resumed, 6)
    assert (rows, uids) == drawn(whole, 6) and uids == list(range(3 * before, 3 * before + 18))


def test_the_shares_of_a_mixture_are_logged(caplog):
    caplog.set_level("INFO", logger="hybridflow")
    stream(mixture=[6.0, 2.0])
    assert "a.jsonl: 0.75 of the draws, from 5 rows, b.jsonl: 0.25 of the draws, from 3 rows" in caplog.text
