"""Rows as the user's code makes them: data.map, data.prompt_template and data.dataset."""

from typing import Any

import pytest

from hybridflow.config.checks import check
from hybridflow.config.data import Data
from hybridflow.config.experiment import Experiment
from hybridflow.data import load_demonstrations, load_prompts
from hybridflow.data.selection import read_rows, unselected
from hybridflow.errors import ConfigError, DataError, Problems
from tests.unit.data.conftest import texts, written

CODE = """
from torch.utils.data import Dataset, IterableDataset

def to_row(row):
    return None if row["n"] == 2 else {"prompt": row["q"] * row["n"], "answer": row["n"]}
def nothing(row): return None
def divides(row): return {"prompt": 1 / (row["n"] - 2)}
def texts(row): return row["q"]
number = 3
def leaves(row): raise SystemExit(1)

class Numbers(Dataset):
    def __init__(self, data_files, tokenizer, config, limit=3):
        self.text, self.limit = data_files[0] + str(config.batch_size) + tokenizer.eos_token, limit
    def __len__(self): return self.limit
    def __getitem__(self, index): return {"prompt": self.text, "answer": index}
class Stream(IterableDataset):
    def __init__(self, path): self.path = path
    def __iter__(self): return iter([{"prompt": self.path}, {"prompt": "b"}])
class Neither: pass
class Strange:
    def __init__(self, source, processor): pass
class Empty:
    def __iter__(self): return iter([])
class Lists:
    def __iter__(self): return iter([["a"]])
class Fails:
    def __len__(self): return 1
    def __getitem__(self, index): raise KeyError("no")
"""
ROWS = [{"q": "a", "n": 1}, {"q": "b", "n": 2}, {"q": "c", "n": 3}]
STORIES = [{"Story": "Two figs.", "Ask": "How many?", "Gold": {"n": 2}}, {"Story": "{}", "Ask": None, "Gold": {"n": 0}}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(CODE)
    written(tmp_path / "a.jsonl", ROWS)
    return tmp_path


def test_a_function_makes_the_rows_and_those_it_leaves_out_are_counted(folder, tokenizer, caplog):
    caplog.set_level("INFO", logger="hybridflow")
    config = Data(map=f"{folder}/my.py:to_row", filters=[])
    for settings in (config, unselected(config)):  # training and evaluation
        batch = load_prompts(["a.jsonl"], settings, tokenizer)
        assert batch.object("prompt") == ["a", "ccc"] and batch.object("answer") == [1, 3]
    assert f"data=a.jsonl map={folder}/my.py:to_row gives 2 of 3 rows" in caplog.text
    assert read_rows("a.jsonl", config).place(1) == "row 3 of 'a.jsonl'"
    assert len(read_rows("builtin:calculator/eval", config)) > 1


def test_a_template_makes_the_prompt_of_columns(folder, tokenizer):
    written(folder / "b.jsonl", STORIES[:1])
    config = Data(prompt_template="{Story} {Ask} {{n={Gold.n}}}", answer_key="Gold.n")
    batch = load_prompts(["b.jsonl"], config, tokenizer)
    assert batch.object("prompt") == ["Two figs. How many? {n=2}"] and batch.object("answer") == [2]
    trained = load_demonstrations(["b.jsonl"], config, tokenizer)
    assert texts(tokenizer, trained.tokens("response_ids").rows()) == ["2<eos>"]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("Numbers", [["train64<eos>", 0], ["train64<eos>", 1], ["train64<eos>", 2]]),
        ("Stream", [["train", None], ["b", None]]),
    ],
)
def test_a_class_gives_the_rows_of_each_entry(folder, tokenizer, kind, rows):
    batch = load_prompts(["train"], Data(dataset=f"{folder}/my.py:{kind}"), tokenizer)
    assert [list(row) for row in zip(batch.object("prompt"), batch.object("answer"), strict=True)] == rows


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"map": "nothing"}, "my.py:nothing returned None for all 3 rows of 'a.jsonl'", "Return the row"),
        (
            {"map": "divides"},
            "raised ZeroDivisionError: division by zero (my.py, line 7), for row 2 of",
            "Fix the code",
        ),
        (
            {"map": "leaves"},
            "my.py:leaves called sys.exit: SystemExit: 1 (my.py, line 10), for row 1 of",
            "Fix the code",
        ),
        (
            {"map": "texts"},
            "returned an object of type str for row 1 of 'a.jsonl', not a row",
            '{"prompt": ..., "answer": ...}',
        ),
        ({"map": "number"}, "is of type int, not a function", "Name a function"),
        ({"dataset": "number"}, "is of type int, not a class", "Name a class"),
        ({"dataset": "Neither"}, "has neither __len__ and __getitem__ nor __iter__", "def __getitem__(self, index)"),
        ({"dataset": "Strange"}, "requires the parameter processor, which hybridflow does not", "Give it a default"),
        ({"dataset": "Empty"}, "my.py:Empty gives no rows for 'a.jsonl'", "at least one row"),
        (
            {"dataset": "Lists"},
            "gave an object of type list for row 1 of 'a.jsonl', not a row",
            '{"prompt": ..., "answer": ...}',
        ),
        ({"dataset": "Fails"}, "raised KeyError: 'no' (my.py, line 29), for row 1 of 'a.jsonl'", "Fix the code"),
        ({"prompt_template": "{q} {m}"}, "data.prompt_template: 'a.jsonl' has no column 'm'", "columns are: q, n"),
    ],
)
def test_code_that_does_not_work_is_named_with_its_row(folder, tokenizer, settings, found, remedy):
    named: dict[str, Any] = {
        key: value if "{" in value else f"{folder}/my.py:{value}" for key, value in settings.items()
    }
    with pytest.raises((ConfigError, DataError)) as caught:
        load_prompts(["a.jsonl"], Data(**named), tokenizer)
    assert found in caught.value.message and remedy in caught.value.remedy


def test_a_template_needs_text_in_every_row(folder):
    written(folder / "b.jsonl", STORIES)
    with pytest.raises(DataError, match=r"row 2 of 'b.jsonl' has nothing in the column 'Ask', not text.*data\.map"):
        read_rows("b.jsonl", Data(prompt_template="{Story} {Ask}"))
    with pytest.raises(DataError, match=r"row 1 of 'b.jsonl' has a value of type dict in the column 'Gold'"):
        read_rows("b.jsonl", Data(prompt_template="{Gold}"))


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"prompt_template": "{Body"}, "data.prompt_template='{Body': expected '}' before end", "{Body}"),
        ({"prompt_template": "{} {b}"}, "the braces are empty", 'data.prompt_template="{Body} {Question}"'),
        (
            {"prompt_template": "{n:>3}"},
            "not a format or a conversion (':>3')",
            "Write {n}; to format values, use data.map",
        ),
        ({"prompt_template": "Answer:"}, "names no column", "{Body} {Question}"),
        ({"prompt_template": "{a}", "prompt_key": "b"}, "both say where prompts come from", "Leave one out"),
    ],
)
def test_settings_that_cannot_work_are_found_before_data_is_read(settings, found, remedy):
    problems = Problems(collects=True)
    check(Experiment(data=Data(**settings)), problems)
    assert any(found in fault.message and remedy in fault.remedy for fault in problems.found)
