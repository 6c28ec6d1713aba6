"""Where a resumed run goes on in data that has another number of rows than before."""

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.loop import ResumeChanged
from hybridflow.data.loader import PromptLoader
from hybridflow.data.order import Epochs
from hybridflow.errors import CheckpointError
from hybridflow.launch.resumption import changed_rows


def stream(rows):
    ids = Ragged.from_rows([[row] for row in range(rows)], torch.int64)
    return PromptLoader(Batch.of(tokens={"prompt_ids": ids}), 2, Epochs(rows, 0, shuffle=False))


SAVED = {"prompts": {"position": 8, "rows": 5}, "pretraining": {"position": 2, "rows": 4}}


def test_as_many_rows_as_before_are_no_change():
    assert changed_rows(SAVED, {"prompts": stream(5), "pretraining": stream(4)}, ResumeChanged.refuse) == []


@pytest.mark.parametrize(
    ("name", "rows", "before", "key"),
    [("prompts", 6, 5, "data.train_files"), ("pretraining", 3, 4, "data.pretraining_files")],
)
def test_another_number_of_rows_is_refused_in_the_words_of_the_setting(name, rows, before, key):
    with pytest.raises(CheckpointError, match=f"{key} gives {rows} rows; .* it gave {before}") as caught:
        changed_rows(SAVED, {name: stream(rows)}, ResumeChanged.refuse)
    assert "trainer.resume_changed=accept" in caught.value.remedy and "trainer.resume=never" in caught.value.remedy


def test_accepted_rows_are_told_with_the_row_that_the_stream_gives_next():
    resumed = stream(6)
    (told,) = changed_rows(SAVED, {"prompts": resumed}, ResumeChanged.accept)
    assert "resuming with 6 rows of data.train_files (there were 5): 8 rows were handed out" in told
    assert "at row 3 of epoch 1" in told
    resumed.restore(SAVED["prompts"])
    assert resumed.next().tokens("prompt_ids").values.tolist() == [2, 3]
    assert resumed.epoch == 1
