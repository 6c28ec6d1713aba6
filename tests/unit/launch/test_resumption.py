"""Where a resumed run goes on in data that has another number of rows than before."""

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.loop import ResumeChanged
from hybridflow.data.loader import BatchStream
from hybridflow.data.order import Epochs, GrowingWindow, Mixture, Order
from hybridflow.errors import CheckpointError
from hybridflow.launch.resume import changed_rows


def stream(rows: int, order: Order | None = None) -> BatchStream:
    ids = Ragged.from_rows([[row] for row in range(rows)], torch.int64)
    return BatchStream(Batch.of(tokens={"prompt_ids": ids}), 2, order or Epochs(rows, 0, shuffle=False))


SAVED = {"prompts": {"position": 8, "rows": 5}, "pretraining": {"position": 2, "rows": 4}}


@pytest.mark.parametrize(
    ("name", "rows", "before", "key"),
    [("prompts", 6, 5, "data.train_files"), ("pretraining", 3, 4, "data.pretraining_files")],
)
def test_another_number_of_rows_is_refused_in_the_words_of_the_setting(name, rows, before, key):
    with pytest.raises(CheckpointError, match=f"{key} gives {rows} rows; .* it gave {before}") as caught:
        changed_rows(SAVED, {name: stream(rows)}, ResumeChanged.refuse)
    assert "trainer.resume_changed=accept" in caught.value.remedy and "trainer.resume=never" in caught.value.remedy


def test_as_many_rows_are_no_change_and_accepted_ones_are_told_with_the_row_that_comes_next():
    assert changed_rows(SAVED, {"prompts": stream(5), "pretraining": stream(4)}, ResumeChanged.refuse) == []
    resumed = stream(6)
    (told,) = changed_rows(SAVED, {"prompts": resumed}, ResumeChanged.accept)
    assert "resuming with 6 rows of data.train_files (there were 5): 8 rows were used" in told
    assert "at row 2 of epoch 1 (both count from 0)" in told
    resumed.restore(SAVED["prompts"])
    assert resumed.next().tokens("prompt_ids").values.tolist() == [2, 3]
    assert resumed.epoch == 1


def told_and_next(order: Order, rows: int, position: int) -> tuple[str, list[int]]:
    """What an accepted resume says of the position, and the rows that come next."""
    saved, resumed = {"prompts": {"position": position, "rows": rows - 2}}, stream(rows, order)
    (told,) = changed_rows(saved, {"prompts": resumed}, ResumeChanged.accept)
    resumed.restore(saved["prompts"])
    return told.partition(" so the run continues at ")[2], resumed.next().tokens("prompt_ids").values.tolist()


@pytest.mark.parametrize("position", [2, 120, 3000])
def test_the_rows_of_a_mixture_are_told_by_the_draws_from_each_file(position):
    def mixture() -> Mixture:
        files = [Epochs(12, "0/file 0", shuffle=False), Epochs(90, "0/file 1", shuffle=False)]
        return Mixture(files, [12, 90], [0.9, 0.1], 0)

    earlier = mixture().rows(0, position)
    first, second = int((earlier < 12).sum()), int((earlier >= 12).sum())
    told, following = told_and_next(mixture(), 102, position)
    assert told.startswith(
        f"draw {position} (counted from 0) of data.mixture (draws so far, by file: {first}, {second})"
    )
    assert "epoch" not in told
    assert following[0] == (first % 12 if following[0] < 12 else 12 + second % 90)


def test_the_rows_of_a_curriculum_are_told_by_its_length_and_those_after_it_by_epochs():
    def window() -> GrowingWindow:
        return GrowingWindow(Epochs(10, 0, shuffle=False), torch.arange(10.0), 40, 0)

    told, _ = told_and_next(window(), 10, 16)
    assert told.startswith("row 16 (counted from 0) of the 40 of data.curriculum_steps") and "epoch" not in told
    told, following = told_and_next(window(), 10, 54)
    assert (
        told.startswith("row 4 of epoch 1 (both count from 0) in the order of the current rows")
        and "end of the curriculum" in told
    )
    assert following == [4, 5]
