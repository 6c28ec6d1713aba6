"""Rows that are read on demand are those that are read at once, in the same order, also after a resume."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from hybridflow.batch import Batch
from hybridflow.config.data import Data, Truncation
from hybridflow.data import json_lists, load_demonstrations, load_labeled, load_preferences, load_prompts
from hybridflow.data.loader import training_stream
from hybridflow.data.streaming import StreamedRows
from hybridflow.errors import ConfigError, DataError
from tests.unit.data.conftest import written

ROOT = Path(__file__).parents[3]
ROWS = [
    {
        "prompt": "p" * (1 + n % 4),
        "completion": f"c{n}",
        "chosen": f"a{n}",
        "rejected": f"b{n}",
        "label": n % 3 == 0,
        "n": n,
    }
    for n in range(150)
]
CODE = """
def odd(row): return {**row, "prompt": row["prompt"] + "!"} if row["n"] % 2 else None
def small(n): return n < 40
def none(row): return None if row["n"] >= 10 else row
class Squares:
    def __init__(self, source): pass
    def __len__(self): return 12
    def __getitem__(self, index): return {"prompt": str(index * index)}
class Flow:
    def __iter__(self): return iter([{"prompt": "a"}])
"""


def stream(files, config, tokenizer, load=load_prompts):
    def encode(table):
        return load([table], config, tokenizer)

    if config.streaming:
        parts = [StreamedRows(file, config, encode, tokenizer) for file in files]
    else:
        parts = [load([file], config, tokenizer) for file in files]
    return training_stream(parts, config, seed=3)


def shown(batch: Batch) -> dict:
    tokens = {name: [row.tolist() for row in column.rows()] for name, column in batch.token_columns.items()}
    return tokens | batch.objects | {name: column.tolist() for name, column in batch.row_columns.items()}


def both(files, tokenizer, load=load_prompts, **settings):
    """The same stream with the rows in memory, and on demand."""
    config = Data(train_files=files, batch_size=16, **settings)
    on_demand = Data(train_files=files, batch_size=16, streaming=True, **settings)
    return stream(files, config, tokenizer, load), stream(files, on_demand, tokenizer, load)


LINES = [json.dumps(row) + "\n" for row in ROWS]
TABLE = pyarrow.Table.from_pylist(ROWS)
WRITE = {
    "a.jsonl": lambda path: path.write_text("\ufeff" + "\n".join(LINES) + "\n \n"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress("".join(LINES).encode())),
    "a.json": lambda path: path.write_text("".join(LINES)),
    "list.json": lambda path: path.write_text("\ufeff " + json.dumps(ROWS, indent=2)),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.parquet": lambda path, table=TABLE: pyarrow.parquet.write_table(table, path, row_group_size=70),
    "a.feather": lambda path, table=TABLE: pyarrow.feather.write_feather(table, path),
    "a.csv": lambda path: pyarrow.csv.write_csv(TABLE, path),
    "saved": lambda path, table=TABLE: datasets.Dataset(table).save_to_disk(path),
    "part-*.jsonl": lambda path: [
        path.with_name(f"part-{part}.jsonl").write_text("".join(LINES[50 * part :][:50])) for part in range(3)
    ],
}


@pytest.mark.parametrize("name", WRITE)
def test_a_file_of_any_kind_gives_the_same_batches_on_demand(tmp_path, tokenizer, name):
    WRITE[name](tmp_path / name)
    in_memory, on_demand = both([str(tmp_path / name)], tokenizer)
    assert len(on_demand) == len(in_memory) == 150 and in_memory.columns == on_demand.columns
    for _ in range(12):  # more than one epoch
        assert shown(on_demand.next()) == shown(in_memory.next())


NO_VALUES = {
    "prompt": pyarrow.array([b"1+1=", b"2+2=", b"3\xff3="]).view(pyarrow.string()),
    "day": pyarrow.array([0, 0, 2_000_000_000], pyarrow.date32()),
    "time": pyarrow.array([0, 0, 1 << 62], pyarrow.timestamp("us")),
    "extra": pyarrow.array([{"day": 0}, None, {"day": 1 << 62}], pyarrow.struct({"day": pyarrow.timestamp("us")})),
}


@pytest.mark.parametrize("column", NO_VALUES)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "saved"])
def test_a_value_that_is_not_utf8_or_no_date_is_an_error_that_names_its_row(
    tmp_path, tokenizer, name, streaming, column
):
    table = pyarrow.table({"prompt": pyarrow.array(["1+1=", "2+2=", "3+3="])} | {column: NO_VALUES[column]})
    WRITE[name](tmp_path / name, table)
    with pytest.raises(
        DataError, match=f"{name}', row 3, column '{column}': not a readable value: .*text in UTF-8 and dates"
    ):
        stream([str(tmp_path / name)], Data(streaming=streaming, batch_size=1), tokenizer)


@pytest.mark.parametrize("load", [load_demonstrations, load_preferences, load_labeled])
def test_rows_of_every_kind_can_be_read_on_demand(tmp_path, tokenizer, load):
    rows = [{name: cell for name, cell in row.items() if name != "label" or load is load_labeled} for row in ROWS]
    in_memory, on_demand = both([written(tmp_path / "a.jsonl", rows)], tokenizer, load)
    assert [shown(on_demand.next()) for _ in range(3)] == [shown(in_memory.next()) for _ in range(3)]


def test_rows_that_are_left_out_are_replaced_by_the_next_and_a_resume_goes_on_alike(tmp_path, tokenizer, caplog):
    (tmp_path / "my.py").write_text(CODE)
    path = written(tmp_path / "a.jsonl", ROWS)
    config = Data(
        train_files=[path], batch_size=16, streaming=True, max_prompt_tokens=4, truncation=Truncation.drop,
        map=f"{tmp_path}/my.py:odd", filters=[f"{tmp_path}/my.py:small"],
    )  # fmt: skip
    whole = stream([path], config, tokenizer)
    assert "leaves out" in caplog.text
    caplog.clear()
    first = [whole.next() for _ in range(3)]
    kept = {row["n"] for row in ROWS if row["n"] % 2 and row["n"] < 40 and len(row["prompt"]) < 4}
    assert {n for batch in first for n in batch.object("n")} == kept and all(len(batch) == 16 for batch in first)
    uids = [uid for batch in first for uid in batch.row("uid").tolist()]
    assert len({*uids}) == 48
    assert not caplog.records
    position = whole.state()
    assert position["position"] > 150 * (48 // len(kept)) - 150
    resumed = stream([path], config, tokenizer)
    resumed.restore(position)
    for _ in range(4):
        assert shown(resumed.peek()) == shown(resumed.peek())
        assert shown(resumed.next()) == shown(whole.next())


@pytest.mark.parametrize("settings", [{}, {"mixture": [0.5, 0.5]}, {"shuffle": False, "max_rows": 20}])
def test_several_sources_give_the_same_rows_in_each_batch(tmp_path, tokenizer, settings):
    questions = [{"question": "q", "extra": 1}] * 30
    files = [written(tmp_path / "a.jsonl", ROWS[:60]), written(tmp_path / "b.jsonl", questions)]
    in_memory, on_demand = both(files, tokenizer, **settings)
    for _ in range(8):
        expected, found = shown(in_memory.next()), shown(on_demand.next())
        assert found.pop("uid") == expected.pop("uid") and found.keys() == expected.keys()
        assert sorted(map(repr, zip(*found.values(), strict=True))) == sorted(
            map(repr, zip(*[expected[name] for name in found], strict=True))
        )


def test_entries_of_a_list_are_found_wherever_a_block_ends(tmp_path, monkeypatch):
    """Blocks of some bytes end in the middle of escapes, literals and characters of several bytes."""
    rows = [{"prompt": '\u00e9\u4e2d\\"]}', "n": [n, -1.5e-7, True, None, "\U0001f600" * n]} for n in range(40)]
    text = json.dumps(rows, ensure_ascii=False, indent=1).encode() + b" \n"
    path = tmp_path / "a.json"
    path.write_bytes(text)
    for block in (1, 7, 64):
        monkeypatch.setattr(json_lists, "_BLOCK_BYTES", block)
        with path.open("rb") as file:
            assert [json.loads(text[begin:end]) for begin, end in json_lists.entry_spans(file, "a.json")] == rows


@pytest.mark.parametrize("settings", [{}, {"curriculum_steps": 6}, {"mixture": [0.5, 0.5]}, {"max_rows": 30}])
def test_rows_on_demand_are_sorted_by_difficulty_as_those_in_memory(tmp_path, tokenizer, settings):
    files = [written(tmp_path / f"{part}.jsonl", ROWS[part::2]) for part in range(2)]
    # a batch has the rows of several files in the order of the files
    files = files if "mixture" in settings else files[:1]
    in_memory, on_demand = both(files, tokenizer, difficulty_key="n", **settings)
    for _ in range(8):
        found, expected = (sorted(each.next().object("n")) for each in (on_demand, in_memory))
        assert found == expected


def test_rows_that_are_left_out_have_no_difficulty(tmp_path, tokenizer):
    (tmp_path / "my.py").write_text("def fourth(n): return n % 4 == 0")
    path = written(tmp_path / "a.jsonl", ROWS[::-1])
    config = Data(
        train_files=[path], batch_size=5, streaming=True, difficulty_key="n", filters=[f"{tmp_path}/my.py:fourth"]
    )
    assert stream([path], config, tokenizer).next().object("n") == [0, 4, 8, 12, 16]


def test_own_and_built_in_rows_can_be_read_on_demand(tmp_path, tokenizer):
    (tmp_path / "my.py").write_text(CODE)
    config = Data(batch_size=12, streaming=True, shuffle=False, dataset=f"{tmp_path}/my.py:Squares")
    assert stream(["all"], config, tokenizer).next().object("prompt") == [str(n * n) for n in range(12)]
    assert len(stream(["builtin:calculator/eval"], config, tokenizer).next()) == 12
    with pytest.raises(ConfigError, match=r"my.py:Flow has no __len__ and __getitem__.*data\.streaming=false"):
        stream(["all"], Data(streaming=True, dataset=f"{tmp_path}/my.py:Flow"), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "load", "found"),
    [
        ("a.json", "[1]", load_prompts, "entry 1 of '.*a.json' is of type int, not an object"),
        (
            "a.json",
            '[{"prompt": "a"}\n{"prompt": "b"}]',
            load_prompts,
            "line 2: not a JSON list .expected ',', found '{'",
        ),
        ("a.json", '[\n{"prompt": "a}]', load_prompts, "line 2: not a JSON list .Unterminated string"),
        ("a.json", '[{"prompt": "a"},', load_prompts, "not a JSON list .Expecting value"),
        ("a.json", '[{"prompt": "a"}] x', load_prompts, "expected nothing after the list"),
        ("a.json", "[]", load_prompts, "has no rows"),
        ("a.jsonl", "\n", load_prompts, "has no rows"),
        ("a.jsonl.gz", "plain", load_prompts, "cannot be read: Not a gzipped file"),
        ("a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}', load_labeled, "cannot split"),
    ],
)
def test_what_cannot_be_read_on_demand_is_an_error(tmp_path, tokenizer, name, content, load, found):
    (tmp_path / name).write_text(content)
    with pytest.raises((ConfigError, DataError), match=found):
        stream([str(tmp_path / name)], Data(streaming=True, batch_size=1), tokenizer, load)


def test_a_fault_after_the_first_rows_is_found_when_it_is_read_and_named(tmp_path, tokenizer, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n' * 1000 + '{"prompt": \n{"prompt": 3}\n')
    rows = StreamedRows(
        str(path), config := Data(streaming=True), lambda table: load_prompts([table], config, tokenizer), tokenizer
    )
    assert len(rows) == 1002
    with pytest.raises(DataError, match=r"a.jsonl', line 2001, column 12: not JSON"):
        rows.select([3, 1000])
    with pytest.raises(DataError, match=r"Row 1002 of '.*a.jsonl' has a prompt that is of type int"):
        rows.select([1001])


@pytest.mark.parametrize(
    ("allowed", "error"), [(0.05, r"only 1 of the first 1000 rows read \(0\.1%\)"), (0.0005, None)]
)
def test_a_stream_of_which_next_to_nothing_is_left_ends(tmp_path, tokenizer, caplog, allowed, error):
    (tmp_path / "my.py").write_text("def f(n): return n == 7")
    path = written(tmp_path / "a.jsonl", [{"prompt": "a", "n": n} for n in range(1000)])
    config = Data(
        batch_size=1, streaming=True, filters=[f"{tmp_path}/my.py:f"], shuffle=False, min_kept_fraction=allowed
    )
    source = stream([path], config, tokenizer)
    if error is None:
        assert [source.next().object("n") for _ in range(3)] == [[7]] * 3
        return
    with pytest.raises(DataError, match=rf"{error}.*data\.min_kept_fraction=0"):
        for _ in range(3):
            source.next()


GROWTH = r"""
import re, sys
from pathlib import Path
from hybridflow.config.data import Data, Truncation
from hybridflow.data import load_prompts
from hybridflow.data.loader import training_stream
from hybridflow.data.streaming import StreamedRows
from tests.unit.data.conftest import character_tokenizer

def kilobytes(line):
    return int(re.search(line + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])

tokenizer, config = character_tokenizer(), Data(streaming=True, batch_size=16, max_prompt_tokens=10_000)
for path in sys.argv[1:]:
    before = kilobytes("VmRSS")
    part = StreamedRows(path, config, lambda table: load_prompts([table], config, tokenizer), tokenizer)
    stream = training_stream([part], config, seed=0)
    for _ in range(40):
        stream.next()
    print(len(stream), kilobytes("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    paths, counts = [], []
    for kind in ("jsonl", "parquet"):
        for rows in (2_000, 100_000):
            table = pyarrow.table({"prompt": [f"{row} " + "x" * 700 for row in range(rows)]})
            path = tmp_path / f"{rows}.{kind}"
            if kind == "jsonl":
                written(path, table.to_pylist())
            else:
                pyarrow.parquet.write_table(table, path, row_group_size=rows)
            paths.append(str(path))
            counts.append(rows)
    ran = subprocess.run([sys.executable, "-c", GROWTH, *paths], check=True, capture_output=True, text=True, cwd=ROOT)
    found = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert [count for count, _ in found] == counts
    # The larger files have 70 MB more; their indices take 3 MB, and allocators keep some of what they free.
    assert all(growth < 30_000 for _, growth in (found[1], found[3]))
