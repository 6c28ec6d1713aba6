from threading import Event, current_thread

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


class Waiting:
    """Twelve rows that are read once `may_read` is set, and the threads that have asked for some."""

    columns = ("prompt_ids", "answer")

    def __init__(self) -> None:
        self.rows = table(12)
        self.may_read, self.is_asked, self.readers = Event(), Event(), []

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: torch.Tensor) -> Batch:
        self.readers.append(current_thread().name)
        self.is_asked.set()
        assert self.may_read.wait(60)
        if 99 in rows.tolist():
            raise DataError("row 99", remedy="none")
        return self.rows.select(rows)


class OneBadRow(Epochs):
    """Row 99, which is not there, in place of the fifth."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.tensor([99 if place == 4 else place for place in super().rows(start, stop).tolist()])


def test_a_batch_is_prepared_in_a_thread_and_counts_once_it_is_taken():
    rows = Waiting()
    source = BatchStream(rows, 4, Epochs(12, 0, shuffle=False))
    source.prepare()
    assert rows.is_asked.wait(60)  # before the batch is asked for
    source.prepare()
    assert source.state()["position"] == 0 and source.epoch == 0
    rows.may_read.set()
    assert source.next().object("answer") == [0, 1, 2, 3]
    assert source.next().object("answer") == [4, 5, 6, 7]
    assert rows.readers == ["read data", "read data"]
    source.prepare()
    resumed = BatchStream(rows, 4, Epochs(12, 0, shuffle=False))
    resumed.restore(source.state())
    assert resumed.next().object("answer") == source.next().object("answer") == [8, 9, 10, 11]


def test_the_error_of_a_prepared_batch_is_raised_when_it_is_taken_and_by_no_other():
    rows = Waiting()
    rows.may_read.set()
    source = BatchStream(rows, 4, OneBadRow(12, 0, shuffle=False))
    source.next()
    for _ in range(2):
        source.prepare()
        with pytest.raises(DataError, match="row 99"):
            source.next()
    source.prepare()
    source.restore({"position": 8, "rows": 12})
    assert source.next().object("answer") == [8, 9, 10, 11]


def test_rows_in_memory_are_not_prepared():
    source = loader(7, 4)
    source.prepare()
    assert source._prepared is None
