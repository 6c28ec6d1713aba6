"""Data files that are wrong, odd or hostile: encodings, JSON, columns, values, parquet, saved datasets, paths.

python -m tests.attacks data_files --seed 0
"""

import datetime
import gzip
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet

from tests.attacks.small_run import run, write_rows
from tests.attacks.trial import Case

COUNT = 180
LIMIT_SECONDS = 90.0
Make = Callable[[], str | None]
"""Writes into the current directory; answers the source's name where it is not `data.jsonl`."""

SUM = {"prompt": "1+1=", "answer": "2"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
LABELED = {"prompt": "1+1=", "completion": "2", "label": True}
OF_TRAINER = {
    "ppo": SUM,
    "sft": {"prompt": "1+1=", "completion": "2"},
    "dpo": PAIR,
    "kto": LABELED,
    "reward_model": PAIR,
}
VALUES: list[object] = [
    None, "", " ", 0, -1, 1.5, True, [], {}, [None], [[]], [""], {"role": "user"}, [{"role": "user"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": 3}], [{"role": 3, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "x\ud83d", "content": "x"}],
    [{"role": "assistant", "content": ""}], "\x00", "\u202e1+1=", "\U0001f600" * 9, "1" * 70, 10**400, float("nan"),
    float("inf"), -1e309, "a\ud800",
]  # fmt: skip


def cases(seed: int) -> list[Case]:
    """The corpus of a seed."""
    chance = random.Random(seed)
    found = [*_texts(chance), *_json(chance), *_parquet(chance), *_saved(chance), *_paths(chance)]
    while len(found) < COUNT:
        found.append(_odd_value(chance))
    chance.shuffle(found)
    return [Case(name, partial(_attempt, trainer, make)) for name, trainer, make in found[:COUNT]]


Entry = tuple[str, str, Make]


def _attempt(trainer: str, make: Make) -> int:
    name = make()
    return run(trainer, data=name or "data.jsonl")


def _content(name: str, content: bytes, file: str = "data.jsonl", trainer: str = "ppo") -> Entry:
    def make() -> str:
        Path(file).write_bytes(content)
        return file

    return f"{trainer} {file} {name}", trainer, make


def _lines(row: object = SUM, count: int = 4) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for _ in range(count))


def _texts(chance: random.Random) -> list[Entry]:
    good = _lines()
    zipped = gzip.compress(good)
    flipped = bytearray(zipped)
    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return [
        _content("empty", b""),
        _content("blank", b"\n \n\t\n"),
        _content("BOM", b"\xef\xbb\xbf" + good),
        _content("UTF-16", good.decode().encode("utf-16")),
        _content("UTF-32", good.decode().encode("utf-32")),
        _content("Latin-1", '{"prompt": "\u00e9", "answer": "2"}\n'.encode("latin-1") * 4),
        _content("CRLF", good.replace(b"\n", b"\r\n")),
        _content("CR", good.replace(b"\n", b"\r")),
        _content("NUL bytes", good.replace(b"prompt", b"pro\0mpt")),
        _content("all NUL", bytes(4096)),
        _content("noise", chance.randbytes(5000)),
        _content("truncated", good[:-9]),
        _content("a line of 20 MB", json.dumps({"prompt": "1+1" * 7_000_000, "answer": "2"}).encode()),
        _content("a conversation of 9 MB", _lines({"messages": [{"role": "user", "content": "1+1" * 3_000_000}]}, 1)),
        _content("a completion of 9 MB", _lines({"prompt": "1", "completion": "1+1" * 3_000_000}, 1), trainer="sft"),
        _content("a chosen of 9 MB", _lines(PAIR | {"chosen": "1+1" * 3_000_000}, 2), trainer="dpo"),
        _content("escapes", b'{"prompt" \x1b]0;pwned\x07\x1b[31mRED\x1b[2J}\n'),
        _content("escapes in data_source", _lines(SUM | {"data_source": "a\x1b]0;pwned\x07\x1b[31m../../x"})),
        _content("gzip", zipped, "data.jsonl.gz"),
        _content("gzip, truncated", zipped[:-9], "data.jsonl.gz"),
        _content("gzip, a bit flipped", bytes(flipped), "data.jsonl.gz"),
        _content("not gzip", good, "data.jsonl.gz"),
        _content("gzip of 200 MB of blanks", gzip.compress(b" " * 200_000_000, 1), "data.jsonl.gz"),
        _content("JSON lines", good, "data.json"),
        _content("a list", b"[" + b",".join(good.splitlines()) + b"]", "data.json"),
        _content("a list without end", b"[" + b",".join(good.splitlines()), "data.json"),
        _content("an object", b'{"train": [' + b",".join(good.splitlines()) + b"]}", "data.json"),
        _content("CSV", b"prompt,answer\n1+1=,2\n", "data.csv"),
        _content("no suffix", good, "data"),
    ]


def _json(chance: random.Random) -> list[Entry]:
    deep = {levels: b"[" * levels + b"]" * levels for levels in (60, 100, 900, 2000, 100_000)}
    inside = [b'{"prompt": "1", "answer": %s}\n' % value for value in deep.values()]
    objects = b'{"a":' * 5000 + b"1" + b"}" * 5000
    texts = [
        b"null", b"1", b'"text"', b"[]", b"{}", b"true", b"NaN", b"[1,2]", b'{"prompt": "1",}', b"{'prompt': '1'}",
        b'{"prompt": "1"} {"prompt": "2"}', b"// comment", b'{"prompt": 01}', b'{"prompt": "\t"}',
        b'{"prompt": "\\x"}', b'{"prompt": "1", "prompt": ["x"]}', b'{"": "1"}',
        b'{"prompt": "a\\ud800b", "answer": "2"}', b'{"prompt": "1", "answer": "\\udc00"}',
        b'{"prompt": "\\ud83d\\ude00", "answer": "2"}', b'{"prompt": "1", "answer": 1e999}',
        b'{"prompt": "1", "answer": -Infinity}',
    ]  # fmt: skip
    return [
        *(_content(f"nested {len(text) // 2}", text, file) for text in deep.values() for file in ("data.json",)),
        *(_content(f"nested inside {len(text)}", text * 4) for text in inside),
        _content("nested objects", objects),
        _content("5,000 digits", b'{"prompt": "1", "answer": ' + b"9" * 5000 + b"}\n"),
        _content("4,000 digits", (b'{"prompt": "1", "answer": ' + b"9" * 4000 + b"}\n") * 4),
        _content("5,000 columns", _lines(SUM | {f"c{index}": index for index in range(5000)})),
        *(_content(repr(text), (text + b"\n") * chance.choice((1, 4))) for text in texts),
    ]


def _parquet(chance: random.Random) -> list[Entry]:
    found = []
    plain = _parquet_bytes(pyarrow.table({"prompt": ["1+1="] * 9, "answer": ["2"] * 9}))
    for _ in range(25):
        flipped, place = bytearray(plain), chance.randrange(len(plain))
        flipped[place] ^= 1 << chance.randrange(8)
        found.append(_content(f"bit {place} flipped", bytes(flipped), "data.parquet"))
    found += [_content(f"cut at {cut}", plain[:cut], "data.parquet") for cut in (0, 3, 4, 100, len(plain) - 4)]
    damaged = plain.replace(b"1+1=", b"1\xff1=")
    found.append(_content("invalid UTF-8", damaged, "data.parquet"))
    tables = {
        "dates out of range": {"prompt": ["1"] * 4, "when": pyarrow.array([1 << 62] * 4, pyarrow.timestamp("us"))},
        "date32 out of range": {"prompt": ["1"] * 4, "when": pyarrow.array([2_000_000_000] * 4, pyarrow.date32())},
        "dates": {"prompt": ["1"] * 4, "answer": [datetime.date(2020, 1, 1)] * 4},
        "binary": {"prompt": [b"\xff"] * 4, "answer": ["2"] * 4},
        "no rows": {"prompt": pyarrow.array([], pyarrow.string())},
        "nulls": {"prompt": pyarrow.nulls(4), "answer": ["2"] * 4},
        "dictionary": {"prompt": pyarrow.array(["1+1="] * 4).dictionary_encode(), "answer": ["2"] * 4},
        "structs": {"prompt": [[{"role": "user", "content": "1"}]] * 4, "answer": [{"a": [1]}] * 4},
        "durations": {"prompt": ["1"] * 4, "answer": pyarrow.array([1 << 62] * 4, pyarrow.duration("s"))},
        "decimals": {"prompt": ["1"] * 4, "answer": pyarrow.array([1] * 4, pyarrow.decimal128(38, 10))},
    }
    for name, columns in tables.items():
        found.append(_content(name, _parquet_bytes(pyarrow.table(columns)), "data.parquet"))
    return found


def _parquet_bytes(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _saved(chance: random.Random) -> list[Entry]:
    def saved(change: Callable[[Path], object]) -> Make:
        def make() -> str:
            datasets.Dataset.from_list([SUM] * 4).save_to_disk("saved")
            change(Path("saved"))
            return "saved"

        return make

    changes: dict[str, Callable[[Path], object]] = {
        "whole": lambda path: None,
        "without arrow": lambda path: next(path.glob("*.arrow")).unlink(),
        "arrow cut": lambda path: os.truncate(next(path.glob("*.arrow")), 100),
        "state empty": lambda path: (path / "state.json").write_text(""),
        "state a list": lambda path: (path / "state.json").write_text("[]"),
        "state deep": lambda path: (path / "state.json").write_text("[" * 100_000),
        "state elsewhere": lambda path: (path / "state.json").write_text(
            (path / "state.json").read_text().replace("data-", "../../x-")
        ),
        "info empty": lambda path: (path / "dataset_info.json").write_text(""),
        "info noise": lambda path: (path / "dataset_info.json").write_bytes(chance.randbytes(100)),
        "several splits": lambda path: (path / "dataset_dict.json").write_text("{}"),
    }
    return [(f"saved dataset, {name}", "ppo", saved(change)) for name, change in changes.items()]


def _paths(chance: random.Random) -> list[Entry]:
    def link() -> None:
        os.symlink("data.jsonl", "data.jsonl")

    def pipe() -> str:
        os.mkfifo("pipe.jsonl")
        return "pipe.jsonl"

    names = [
        "gone.jsonl", "a" * 5000, "/".join(["a" * 200] * 40), "~nobodyx/a.jsonl", "~", ".", "/", "", " ",
        "a\nb.jsonl", "/dev/zero", "/proc/self/mem", "owner/name", "owner/name?split=x", "builtin:", "builtin:../x",
        "builtin:calculator/x", "reasoning_gym:", "reasoning_gym:x", "reasoning_gym:leg_counting?size=x", "*.jsonl",
        "a?b=c", "file:///x", "https://example.org/a.jsonl", "\u202e.jsonl",
    ]  # fmt: skip
    return [
        *((f"path {name[:60]!r}", "ppo", partial(str, name)) for name in names),
        ("a link to itself", "ppo", link),
        ("a pipe", "ppo", pipe),
        ("a directory", "ppo", lambda: os.mkdir("data.jsonl")),
    ]


def _odd_value(chance: random.Random) -> Entry:
    """A good row but for one value, among good rows."""
    trainer = chance.choice((*OF_TRAINER,))
    row = OF_TRAINER[trainer]
    column, value = chance.choice((*row, "data_source", "uid", "margin")), chance.choice(VALUES)

    def make() -> None:
        write_rows(Path("data.jsonl"), [row, row, row | {column: value}, row])

    return f"{trainer} {column}={ascii(value)[:60]}", trainer, make
