"""Work that loops or fills the memory is stopped, and reported with its row."""

import os
import sys
import time
from pathlib import Path

import pytest

from hybridflow.config.data import Data
from hybridflow.data import watched as module
from hybridflow.data.chat import prompt_token_ids, with_chat_template
from hybridflow.data.watched import watched
from hybridflow.errors import DataError
from tests.unit.data.conftest import character_tokenizer

USER = [{"role": "user", "content": "hi"}]
WORDS = {"what": "It was given", "remedy": "Take another.", "seconds": 60.0}


def test_the_results_come_back_in_order():
    assert watched(lambda row: row * "ab", range(300), **WORDS) == [row * "ab" for row in range(300)]
    assert watched(str, [], **WORDS) == []


def test_an_error_of_the_work_is_raised_here():
    def refuse(row: int) -> int:
        if row == 2:
            raise DataError("Row 2 is wrong.", remedy="Mend it.")
        return row

    with pytest.raises(DataError, match="Row 2 is wrong") as caught:
        watched(refuse, range(5), **WORDS)
    assert caught.value.remedy == "Mend it."


def test_work_that_does_not_end_is_ended():
    started, processes = time.monotonic(), []

    def last(row: int) -> int:
        if row == 3:
            time.sleep(600)
        return os.getpid()

    with pytest.raises(DataError, match=r"It was given row 4 and did not end in 0\.5 seconds") as caught:
        processes += watched(last, range(9), **(WORDS | {"seconds": 0.5}))
    assert caught.value.remedy == "Take another."
    assert time.monotonic() - started < 30


def test_what_took_the_process_over_cannot_have_its_parent_unpickle_anything(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "unpickled",)

    def forge(row: int) -> None:
        frame = sys._getframe()
        while "sender" not in frame.f_locals and frame.f_back is not None:
            frame = frame.f_back
        frame.f_locals["sender"].send(Attack())

    with pytest.raises(DataError, match="row 1 .* crashed"):
        watched(forge, [0], **WORDS)
    assert not list(tmp_path.iterdir())


def test_work_that_fills_the_memory_is_ended(monkeypatch):
    monkeypatch.setattr(module, "MEMORY_BYTES", 64 << 20)
    with pytest.raises(DataError, match=r"row 1 and took more than 64 MB of memory"):
        watched(lambda row: len(bytearray(1 << 30)), [0], **WORDS)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'x' * 10 ** 10 }}",
    ],
)
def test_a_chat_template_that_loops_or_fills_the_memory_is_a_data_error(monkeypatch, tmp_path, tokenizer, template):
    monkeypatch.setattr(module, "MEMORY_BYTES", 256 << 20)
    monkeypatch.setattr("hybridflow.data.chat.ROW_SECONDS", 1.0)
    with pytest.raises(DataError, match="chat template") as caught:
        prompt_token_ids([USER], character_tokenizer(chat_template=template))
    assert caught.value.remedy
    (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(DataError, match="chat template"):
        with_chat_template(tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ range(10 ** 8) | list }}", "OverflowError: Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.nothing.at.all }}", "has no attribute 'nothing'"),
    ],
)
def test_a_chat_template_that_fails_is_a_data_error(template, found):
    with pytest.raises(DataError, match=f"chat template refuses a conversation: .*{found}") as caught:
        prompt_token_ids([USER], character_tokenizer(chat_template=template))
    assert caught.value.remedy
