import os

import pytest

from hybridflow.config.data import Data
from hybridflow.data import load_demonstrations, load_prompts
from hybridflow.data.labeled_responses import load_labeled
from hybridflow.data.preferences import load_preferences
from hybridflow.data.selection import read_rows, unselected
from hybridflow.errors import ConfigError, DataError, Problems
from tests.unit.data.conftest import texts, written

FILTERS = """
import os
def short(prompt, **columns): return len(prompt) < 4
def answered(answer): return answer is not None
def leveled(level=0): return level > 1
def fails(prompt): return 1 / (len(prompt) - 2) > 0
def counts(prompt): return len(prompt)
def nothing(prompt): return False
def empties(tests, level=0): tests["inputs"].clear(); return True
def forks(level):
    child = os.fork()
    if child == 0:
        return False
    os.waitpid(child, 0)
    return level > 1
def asks(promt): return True
number = 3
"""
LOADERS = [load_prompts, load_demonstrations, load_preferences, load_labeled]
ROWS = [{"prompt": "a" * n, "answer": str(n) if n % 2 else None, "level": n} for n in (1, 2, 3, 4, 5)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "f.py").write_text(FILTERS)
    written(tmp_path / "a.jsonl", ROWS)
    return tmp_path


def levels(folder, *filters, **settings):
    config = Data(filters=[f"{folder}/f.py:{name}" for name in filters], **settings)
    return read_rows(str(folder / "a.jsonl"), config).columns["level"]


@pytest.mark.parametrize(
    ("filters", "max_rows", "left"),
    [
        ((), None, [1, 2, 3, 4, 5]),
        ((), 2, [1, 2]),
        ((), 9, [1, 2, 3, 4, 5]),
        (("short",), None, [1, 2, 3]),
        (("short", "answered"), None, [1, 3]),
        (("answered",), 2, [1, 3]),
        (("leveled",), None, [2, 3, 4, 5]),
    ],
)
def test_the_first_rows_that_all_filters_keep_stay(folder, caplog, filters, max_rows, left):
    caplog.set_level("INFO", logger="hybridflow")
    assert levels(folder, *filters, max_rows=max_rows) == left
    assert ("f.py:short keeps 3 of 5 rows" in caplog.text) == ("short" in filters)


def test_a_filter_cannot_change_the_rows(tmp_path, folder):
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "tests": {"inputs": [1, 2]}}\n')
    config = Data(filters=[f"{folder}/f.py:empties"])
    assert read_rows(str(tmp_path / "b.jsonl"), config).columns["tests"] == [{"inputs": [1, 2]}]


def test_a_process_that_a_filter_forks_ends_where_the_filter_returns(folder, tmp_path):
    us = os.getpid()
    found = levels(folder, "forks")
    if os.getpid() != us:
        (tmp_path / "returned").touch()
        os._exit(9)  # it must not go on as a second pytest
    assert found == [2, 3, 4, 5]
    assert not (tmp_path / "returned").exists()


def test_held_out_rows_are_all_taken(folder):
    config = Data(filters=[f"{folder}/f.py:short"], max_rows=1, difficulty_key="no")
    assert len(read_rows(str(folder / "a.jsonl"), unselected(config))) == 5


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("fails", "raised ZeroDivisionError: division by zero, for row 2 of '{}/a.jsonl'", "Fix the function"),
        ("counts", "returned 1 (of type int) for row 1 of '{}/a.jsonl'", "bool(...)"),
        ("nothing", "keeps none of the 5 rows of '{}/a.jsonl'", "True for each row to keep"),
        ("asks", "needs a column 'promt', which '{}/a.jsonl' does not have", "Did you mean 'prompt'?"),
    ],
)
def test_a_filter_that_does_not_work_is_an_error(folder, name, found, remedy):
    with pytest.raises(DataError) as caught:
        levels(folder, name)
    assert found.replace("{}", str(folder)) in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("shrt", "Did you mean 'short'?"),
        ("number", "Name a function"),
        *((name, "It has: short, answered") for name in ("fil", "name_", "spec", "numbr")),
    ],
)
def test_a_filter_that_is_none_is_an_error_that_suggests_a_function(folder, name, remedy):
    with pytest.raises(ConfigError, match="data.filters") as caught:
        levels(folder, name)
    assert remedy in caught.value.remedy
    assert "__" not in caught.value.remedy and "'number'" not in caught.value.remedy


def test_every_filter_that_is_none_is_named(folder):
    problems = Problems(collects=True)
    with problems.caught():
        levels(folder, "shrt", "answered", "asks", "number")
    assert [any(word in e.message for e in problems.found) for word in ("shrt", "asks", "number")] == [True] * 3


@pytest.mark.parametrize("value", ["3", None, True, float("nan"), 10**400])
def test_a_difficulty_must_be_a_finite_number(tmp_path, value):
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": value}]
    written(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"level: row 2 of '.*a.jsonl' has .*, which is not a finite.*data\.filters"):
        read_rows(str(tmp_path / "a.jsonl"), Data(difficulty_key="level"))
    with pytest.raises(DataError, match=r"data.difficulty_key: .* no column 'levl'.*Did you mean 'level'\?"):
        read_rows(str(tmp_path / "a.jsonl"), Data(difficulty_key="levl"))


@pytest.mark.parametrize("load", LOADERS)
def test_every_kind_of_data_is_filtered_has_difficulties_and_is_shown_as_conversations(folder, chat_tokenizer, load):
    row = {"prompt": "ab", "completion": "b", "chosen": "b", "rejected": "c", "label": True, "about": {"steps": 3}}
    path = written(folder / "a.jsonl", [row, {**row, "prompt": "abcdef"}])
    config = Data(filters=[f"{folder}/f.py:short"], as_chat=True, difficulty_key="about.steps")
    batch = load([path], config, chat_tokenizer)
    assert batch.object("prompt") == [[{"role": "user", "content": "ab"}]] and batch.object("about.steps") == [3]
    assert texts(chat_tokenizer, batch.tokens("prompt_ids").rows()) == ["[user:ab]<eos>[assistant:"]


def test_one_uid_for_two_rows_is_an_error(tmp_path):
    rows = [{"prompt": "a", "uid": 4}, {"prompt": "b", "uid": 5}, {"prompt": "a", "uid": 4}]
    written(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"Rows 1 and 3 of '.*a.jsonl' have the same uid, 4.*Remove the duplicates"):
        read_rows(str(tmp_path / "a.jsonl"), Data())


IMAGES = [{"prompt": "What is this?", "images": ["a.png"], "level": 1}, {"prompt": "b", "images": None, "level": 2}]
PARTS = [{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}]}]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (IMAGES, "row 1 of '.*m.jsonl' has a value in the column 'images', but only text is supported.*data.filters"),
        (PARTS, "Row 1 of '.*m.jsonl' has a prompt that has content of the type image, but only text is supported"),
    ],
)
def test_images_are_refused_in_words_unless_a_filter_leaves_them_out(folder, tokenizer, rows, found):
    path = written(folder / "m.jsonl", rows)
    with pytest.raises(DataError, match=found):
        load_prompts([path], Data(), tokenizer)
    if rows is IMAGES:
        kept = load_prompts([path], Data(filters=[f"{folder}/f.py:leveled"]), tokenizer)
        assert kept.object("prompt") == ["b"]
