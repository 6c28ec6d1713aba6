"""Batches: rows taken, repeated, joined and put together."""

import json
import pickle
import re
from collections import UserList

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch, Ragged
from hybridflow.errors import BatchError
from hybridflow.observability.redaction import redacted_text
from tests.unit.batch.examples import batch_of, contents, plain, ragged, rows_of_tokens


@given(rows_of_tokens, st.data())
def test_selected_rows_keep_all_their_columns(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    batch = batch_of(rows)
    assert contents(batch.select(index)) == [contents(batch)[i] for i in index]


@given(rows_of_tokens, st.data())
def test_parts_put_together_again_are_the_batch(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    batch = batch_of(rows)
    parts = batch.split([cut, len(rows) - cut])
    assert [len(part) for part in parts] == [cut, len(rows) - cut]
    again = Batch.concat(parts)
    assert contents(again) == contents(batch)
    assert again.meta == batch.meta


def test_a_slice_shares_storage_with_the_batch():
    batch = batch_of([[1], [2, 3], [4]])
    part = batch.slice(1, 3)
    assert part.row("uid").untyped_storage().data_ptr() == batch.row("uid").untyped_storage().data_ptr()
    ids = batch.tokens("prompt_ids").values
    assert part.tokens("prompt_ids").values.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()


def test_repeat_keeps_siblings_adjacent_and_numbers_them():
    batch = batch_of([[1], [2, 3], []]).repeat(2)
    assert batch.row("uid").tolist() == [100, 100, 101, 101, 102, 102]
    assert batch.row("sample_index").tolist() == [0, 1, 0, 1, 0, 1]
    assert plain(batch.tokens("prompt_ids")) == [[1], [1], [2, 3], [2, 3], [], []]
    assert batch.object("answer") == [f"answer {i}" for i in (0, 0, 1, 1, 2, 2)]


def test_a_joined_column_replaces_the_one_before_it_of_any_kind():
    batch = batch_of([[1], [2]])
    first = Batch.of(rows={"scores": torch.tensor([1.0, 2.0])}, meta={"temperature": 1.0})
    joined = batch.join(first, Batch.of(rows={"scores": torch.tensor([3.0, 4.0])}))
    assert joined.row("scores").tolist() == [3.0, 4.0]
    assert joined.meta == {"temperature": 1.0}
    assert "scores" not in batch
    other = batch.join(Batch.of(objects={"uid": ["a", "b"]}))
    assert other.object("uid") == ["a", "b"] and other.columns.count("uid") == 1
    assert other.join(Batch.of(tokens={"uid": ragged([[5], [6, 7]])})).tokens("uid").lengths.tolist() == [1, 2]


def test_only_keeps_the_named_columns_that_are_there():
    batch = batch_of([[1], [2]]).only(["answer", "prompt_ids", "scores"])
    assert sorted(batch.columns) == ["answer", "prompt_ids"]
    assert batch.meta == {"temperature": 0.7}


def test_nothing_is_changed_in_place():
    batch = batch_of([[1], [2]])
    before = contents(batch)
    batch.with_columns(rows={"uid": torch.zeros(2)}, objects={"more": [1, 2]}, meta={"temperature": 2.0})
    assert contents(batch) == before
    assert batch.meta == {"temperature": 0.7}


def test_a_missing_column_is_named_with_its_stage_and_who_provides_it():
    with pytest.raises(
        BatchError, match=r"'critic\.update' needs the columns \['returns'\].*'returns' is added by actor\.advantages"
    ):
        batch_of([[1]]).require(("uid", "returns"), stage="critic.update")


@pytest.mark.parametrize(
    "column",
    [
        {"rows": {"scores": torch.zeros(3)}},
        {"tokens": {"values": ragged([[1], [2], [3]])}},
        {"objects": {"source": ["a", "b", "c"]}},
    ],
    ids=["rows", "tokens", "objects"],
)
def test_a_column_with_another_number_of_rows_is_named(column):
    name = next(iter(next(iter(column.values()))))
    with pytest.raises(BatchError, match=f"'{name}' has 3 rows, but the batch has 2.*one value per row"):
        batch_of([[1], [2]]).with_columns(**column)


def test_batches_with_different_columns_are_not_concatenated():
    batch = batch_of([[1]])
    for other in (batch.only(["uid"]), batch.join(Batch.of(objects={"uid": ["a"]}))):
        with pytest.raises(BatchError, match=r"different columns.*batch\.only"):
            Batch.concat([batch, other])


def test_batches_may_hold_no_rows():
    batch = batch_of([[], []])
    assert len(batch.slice(1, 1)) == 0
    assert len(Batch.concat([batch.slice(0, 0), batch])) == 2


def test_token_columns_of_one_stage_keep_their_number_format():
    batch = Batch.of(tokens={"logprobs": Ragged.from_rows([[0.5], [1.0, 2.0]], torch.bfloat16)})
    assert batch.repeat(2).tokens("logprobs").values.dtype is torch.bfloat16


@pytest.mark.parametrize("mask", [torch.tensor([False, False, True, True]), [False, False, True, True]], ids=type)
def test_a_mask_selects_the_rows_that_are_true(mask):
    batch = batch_of([[1], [2, 3], [4], []])
    assert contents(batch.select(mask)) == contents(batch.select([2, 3]))


NO_MASKS = [torch.tensor(mask, dtype=torch.bool) for mask in ([True], [True] * 5, [[True]] * 4, [])]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        *((mask, r"mask of shape .* batch of 4.*one boolean per row, 4 in all") for mask in NO_MASKS),
        (torch.tensor([0.0, 1.0]), "numbers of type float32.*boolean mask"),
    ],
)
def test_masks_of_another_length_and_fractions_select_nothing(rows, found):
    with pytest.raises(BatchError, match=found):
        batch_of([[1], [2], [3], [4]]).select(rows)
    assert len(batch_of([[1], [2]]).select([])) == 0


def test_a_tensordict_shares_the_storage_of_row_and_token_columns():
    tokens = Ragged.from_rows([[1], [2, 3]])
    batch = Batch.of(rows={"uid": torch.arange(2)}, tokens={"prompt_ids": tokens}, objects={"answer": ["a", "b"]})
    found = batch.to_tensordict()
    assert found.batch_size == (2,) and set(found.keys()) == {"uid", "prompt_ids"}
    assert [row.tolist() for row in found["prompt_ids"].unbind()] == [[1], [2, 3]]
    assert found["prompt_ids"].values().data_ptr() == tokens.values.data_ptr()


@pytest.mark.parametrize("answers", [("a", "b"), np.array(["a", "b"]), UserList(["a", "b"])], ids=type)
def test_an_object_column_of_another_sequence_is_kept_as_a_list(answers):
    batch = Batch.of(rows={"x": torch.arange(2)}, objects={"answer": answers})
    assert batch.objects == {"answer": ["a", "b"]}
    assert batch.with_columns(objects={"again": answers}).object("again") == ["a", "b"]
    assert pickle.loads(pickle.dumps(batch)).object("answer") == ["a", "b"]


@pytest.mark.parametrize("answers", ["ab", {"a", "b"}, torch.arange(2), (x for x in "ab")], ids=type)
def test_an_object_column_that_is_no_sequence_is_refused(answers):
    with pytest.raises(BatchError, match="'answer' is of type .*, not a list with one value per row.*Pass a list"):
        Batch.of(rows={"x": torch.arange(2)}, objects={"answer": answers})


def test_a_token_column_that_is_not_ragged_is_refused():
    with pytest.raises(BatchError, match=r"token column 'ids' is of type list, not a Ragged.*Ragged\.from_rows"):
        batch_of([[1], [2]]).with_columns(tokens={"ids": [[1], [2, 3]]})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("asked", "name", "kind"),
    [
        ("tokens", "uid", "dense row column"),
        ("object", "prompt_ids", "ragged token column"),
        ("row", "answer", "Python"),
    ],
)
def test_a_column_of_another_kind_is_named_with_the_method_that_reads_it(asked, name, kind):
    batch = batch_of([[1], [2]]).with_columns(objects={"answer": ["a", "b"]})
    with pytest.raises(BatchError, match=f"'{name}' is a .*{kind}") as caught:
        getattr(batch, asked)(name)
    method = re.search(r"batch\.(\w+)\(", caught.value.remedy)
    assert method and len(getattr(batch, method[1])(name)) == 2


def test_object_columns_of_arrays_hold_python_values():
    batch = Batch.of(objects={"level": np.array([1, 2]), "pair": np.array([[0.5, 1.0], [2.0, 3.0]])})
    assert json.dumps(batch.objects) == '{"level": [1, 2], "pair": [[0.5, 1.0], [2.0, 3.0]]}'
    with pytest.raises(BatchError, match="'level' is of type ndarray") as caught:
        Batch.of(objects={"level": np.array(1)})
    assert redacted_text(caught.value.remedy) == caught.value.remedy
