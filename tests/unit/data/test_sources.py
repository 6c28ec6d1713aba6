import gzip
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.config.paths import builtin_path
from hybridflow.data.sources import read_table, short_name
from hybridflow.errors import DataError, HybridflowError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "level": 3}]
COLUMNS = {"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "level": [None, 3]}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", lines(ROWS).encode()),
        ("data.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0)),
        ("data.json", json.dumps(ROWS, indent=1).encode()),
        ("data.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("lines_called.json", lines(ROWS).encode()),
        ("blank_lines.jsonl", ("\n" + lines(ROWS) + "\n\n").encode()),
        ("byte_order_mark.jsonl", b"\xef\xbb\xbf" + lines(ROWS).encode()),
    ],
)
def test_every_kind_of_json_file_gives_the_same_columns(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_table(str(tmp_path / name)).columns == COLUMNS


def test_parquet_keeps_nested_columns(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"style": "rule", "ground_truth": "4"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert read_table(str(tmp_path / "train.parquet")).columns["reward_model"] == [rows[0]["reward_model"]]


def test_a_list_of_texts_is_the_column_text(tmp_path):
    (tmp_path / "stories.json").write_text('["once", "upon"]')
    assert read_table(str(tmp_path / "stories.json")).columns == {"text": ["once", "upon"]}


def test_a_dataset_of_several_splits_asks_for_one(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"several splits.*splits/train\."):
        read_table(str(tmp_path / "splits"))
    assert read_table(str(tmp_path / "splits" / "train")).columns == COLUMNS


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n', "bad.jsonl', line 2.*not JSON"),
        ("bad.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', "line 3.*not JSON"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2.*0xff is not UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\n[1, 2]\n', "line 2.*is a list, not an object"),
        ("bad.jsonl", b'{"prompt": "a"} {"prompt": "b"}\n', "line 1.*Extra data"),
        ("bad.json", b'[\n {"prompt": "a"},\n {"prompt" "b"}\n]', "bad.json', line 3, column 12: not JSON"),
        ("no.jsonl", b"", "has no rows"),
        ("no.json", b"[]", "has no rows"),
        ("blank.jsonl", b"\n \n", "has no rows"),
        ("data.csv", b"a,b\n", "not in a supported format"),
        ("data.jsonl.gz", b"plain", "not a complete gzip file"),
        ("cut.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0)[:-12], "not a complete gzip file"),
        ("data.parquet", b"PAR1 and more", "not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_errors(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=found):
        read_table(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("trian.jsonl", "No such file or directory: 'trian.jsonl'", "Did you mean 'train.jsonl'"),
        ("nowhere/train.jsonl", "No such file", "{}"),
        (".", "is a directory", "train.jsonl.*'.[?]split=train'"),
        ("builtin:calculator/training", "calculator/training", "builtin:calculator/train"),
    ],
)
def test_a_missing_file_says_what_there_is(tmp_path, monkeypatch, name, found, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(HybridflowError, match=f"{found}.*{remedy.format(tmp_path)}"):
        read_table(name)


def test_builtin_names_are_read_from_the_package(monkeypatch, tmp_path):
    path = tmp_path / "calculator" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(lines(ROWS))
    monkeypatch.setattr("hybridflow.config.paths._ASSETS", tmp_path)
    table = read_table("builtin:calculator/train")
    assert table.data_source == "calculator" and table.columns == COLUMNS
    assert builtin_path("builtin:calculator/train") == path


def test_a_hub_name_without_a_network_says_there_is_no_such_file(monkeypatch, caplog):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(DataError, match="No such file or directory: 'no_such_owner/no_such_data'; and no") as caught:
        read_table("no_such_owner/no_such_data")
    assert "Correct the path" in caught.value.remedy


@pytest.mark.parametrize(
    ("path", "name"),
    [("gsm8k/test.jsonl", "gsm8k"), ("a/math500.jsonl.gz", "math500"), ("x/tinystories", "tinystories")],
)
def test_the_short_name_says_what_data_it_is(tmp_path, path, name):
    assert short_name(tmp_path / path) == name
