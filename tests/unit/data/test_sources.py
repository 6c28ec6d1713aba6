import gzip
import json
import logging

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from hybridflow.config.data import Data
from hybridflow.config.paths import builtin_path
from hybridflow.data.locations import short_name
from hybridflow.data.sources import read_table
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


TABLES = pyarrow.table(COLUMNS)
CSV = b'prompt,answer,level\n1+1=,2,\n"2+2=",4,3\n'


def arrow_stream(table, path):
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", pyarrow.parquet.write_table),
        ("a.feather", pyarrow.feather.write_feather),
        ("a.arrow", arrow_stream),
        ("a.csv", lambda table, path: path.write_bytes(CSV)),
        ("a.csv.gz", lambda table, path: path.write_bytes(gzip.compress(CSV))),
        ("a.tsv", lambda table, path: path.write_bytes(CSV.replace(b",", b"\t"))),
    ],
)
def test_every_kind_of_table_gives_the_same_columns(tmp_path, name, write):
    write(TABLES, tmp_path / name)
    assert read_table(str(tmp_path / name)).columns == COLUMNS


def test_a_csv_column_has_numbers_only_if_all_its_values_are_numbers(tmp_path):
    """The reader guesses types from the first megabytes; the last rows decide as well."""
    first = 'a,1,1,true,2020-01-01\n"b, ""b""\nc",2,2,false,2020-01-02\n' * 200_000
    (tmp_path / "a.csv").write_text("text,number,mixed,flag,date\n" + first + "z,0.5,x,true,2020-01-03\n")
    columns = read_table(str(tmp_path / "a.csv")).columns
    assert {name: [*values[:2], values[-1]] for name, values in columns.items()} == {
        "text": ["a", 'b, "b"\nc', "z"],
        "number": [1.0, 2.0, 0.5],
        "mixed": ["1", "2", "x"],
        "flag": [True, False, True],
        "date": ["2020-01-01", "2020-01-02", "2020-01-03"],
    }


@pytest.mark.parametrize(
    "cells", [["007", "8"], ["1e5", "2"], ["True", "False"], ["NA", "5"], ["", "5"], ["1.50", "2"]]
)
@pytest.mark.parametrize("settings", [{}, {"prompt_key": "ask", "answer_key": "gold"}, {"prompt_template": "{ask}"}])
def test_prompts_and_answers_of_a_csv_file_stay_as_written(tmp_path, cells, settings):
    """Identifiers with leading zeros, or of more digits than a number keeps, stay as well; other numbers do not."""
    prompt, answer = ("ask", "gold") if settings else ("prompt", "answer")
    long = "1" * 25
    rows = [f"{cell},{cell},{long},00{row},{row}.5\n" for row, cell in enumerate(cells)]
    (tmp_path / "a.csv").write_text(f"{prompt},{answer},uid,zip,level\n" + "".join(rows))
    columns = read_table(str(tmp_path / "a.csv"), Data(**settings)).columns
    assert columns[prompt] == cells
    assert columns[answer] == cells or "prompt_template" in settings
    assert (columns["uid"], columns["zip"], columns["level"]) == ([long] * 2, ["000", "001"], [0.5, 1.5])


@pytest.mark.parametrize(("header", "labels"), [("prompt,label", ["1", "0"]), ("prompt,completion,label", [1, 0])])
def test_a_label_is_an_answer_unless_there_is_a_completion(tmp_path, header, labels):
    beside = "good," if "completion" in header else ""
    (tmp_path / "a.csv").write_text(f"{header}\na,{beside}1\nb,{beside}0\n")
    assert read_table(str(tmp_path / "a.csv")).columns["label"] == labels


@pytest.mark.parametrize("source", ["shards", "shards/part-*.jsonl", "**/part-?.jsonl", "shards/part-[01].jsonl"])
def test_a_folder_and_a_pattern_are_the_rows_of_their_files_in_order(tmp_path, monkeypatch, caplog, source):
    caplog.set_level("INFO", logger="hybridflow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    for index, row in enumerate(ROWS):
        (tmp_path / f"shards/part-{index}.jsonl").write_text(lines([row, row]))
    (tmp_path / "shards/README.md").write_text("no data")
    table = read_table(source)
    assert table.columns == {name: [value for value in values for _ in "ab"] for name, values in COLUMNS.items()}
    assert table.data_source == "shards" and table.place(2) == "row 1 of 'shards/part-1.jsonl'"
    assert table.select([1, 3]).place(1) == "row 2 of 'shards/part-1.jsonl'"
    assert f"data={source} files=2 (part-0.jsonl, part-1.jsonl)" in caplog.text


@pytest.mark.parametrize(
    ("files", "source", "found", "remedy"),
    [
        (["train-0.parquet", "test-0.parquet"], "d", "files of several splits: test, train", "'d/train*.parquet'"),
        (["a.parquet", "info.json"], "d", "several formats: .json, .parquet", "'d/*.json'"),
        (["README.md", "rows.jsonl"], "d/train.jsonl", "No such file", "contains: rows.jsonl, README.md"),
        (["README.md"], "d", "a directory with no data files; it contains: README.md", "'d/**/*.parquet'"),
        (["a.parquet"], "d/*.jsonl", "No file matches 'd/*.jsonl'", "Correct the pattern"),
        (["a.parquet", "b.md"], "d/*", "matches files in no supported format: b.md", "Narrow the pattern"),
    ],
)
def test_a_folder_of_other_files_says_how_to_name_them(tmp_path, monkeypatch, files, source, found, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for file in files:
        (tmp_path / "d" / file).touch()
    with pytest.raises(DataError) as caught:
        read_table(source)
    assert found in caught.value.message and remedy in caught.value.remedy


def test_parquet_keeps_nested_columns(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"style": "rule", "ground_truth": "4"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert read_table(str(tmp_path / "train.parquet")).columns["reward_model"] == [rows[0]["reward_model"]]


def test_columns_of_the_same_name_in_parquet_are_an_error(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"several columns are called 'prompt'.*Rename"):
        read_table(str(tmp_path / "a.parquet"))


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
        ("bad.jsonl", b'{"prompt": "a"}\n[1, 2]\n', "line 2.*is of type list, not an object"),
        ("bad.jsonl", b'{"prompt": "a"} {"prompt": "b"}\n', "line 1.*Extra data"),
        ("bad.json", b'[\n {"prompt": "a"},\n {"prompt" "b"}\n]', "bad.json', line 3, column 12: not JSON"),
        ("no.jsonl", b"", "has no rows"),
        ("no.json", b"[]", "has no rows"),
        ("blank.jsonl", b"\n \n", "has no rows"),
        ("data.txt", b"a,b\n", "not in a supported format.*.csv, .tsv"),
        ("data.csv", b"a,b\n", "has no rows"),
        ("data.csv", b"a,b\n1,2,3\n", "not a readable CSV file: .*Expected 2 columns, got 3.*as many cells"),
        ("data.csv", b"a,b\n\xff,2\n", "not a readable CSV file: .*UTF8"),
        ("data.csv", b"a,a\n1,2\n", "several columns are called 'a'.*Rename all but one"),
        ("data.csv", b"a;b\n1;2\n", "has one column, 'a;b': its values are separated by ';'.*with commas"),
        ("data.csv", b"a,b\n" + b"x" * 9_000_000 + b",1\n", "A row has more than 4 MB.*JSON lines or Parquet"),
        ("data.arrow", b"nothing", "not a readable Arrow file"),
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
