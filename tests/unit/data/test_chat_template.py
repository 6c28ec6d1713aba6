"""Chat templates; one that loops or fills the memory is stopped, and the error names its row."""

import sys
from pathlib import Path

import pytest

from hybridflow.config.data import Data
from hybridflow.data import chat_template as module
from hybridflow.data.chat_template import with_chat_template, with_limits
from hybridflow.data.tokenization import prompt_token_ids
from hybridflow.errors import DataError
from tests.unit.data.conftest import CHAT_TEMPLATE, character_tokenizer, texts

TOO_SLOW, TOO_BIG = "did not finish row 1 in 1 seconds", "ran out of memory"
USER = [{"role": "user", "content": "hi"}]


def test_a_template_from_a_file_replaces_the_tokenizers_own(tmp_path, chat_tokenizer):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    other = with_chat_template(chat_tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))
    assert texts(other, prompt_token_ids([USER], other)) == ["<hi>"]
    assert texts(chat_tokenizer, prompt_token_ids([USER], chat_tokenizer)) == ["[user:hi]<eos>[assistant:"]
    assert with_chat_template(chat_tokenizer, Data()) is chat_tokenizer


@pytest.mark.parametrize(
    ("content", "found"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"{% for %}", "refuses")]
)
def test_a_template_file_that_cannot_be_used_is_an_error(tmp_path, chat_tokenizer, content, found):
    if content is not None:
        (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(DataError, match=found):
        with_chat_template(chat_tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system role') }}" + CHAT_TEMPLATE, r"refuses a conversation: no system role.*'hi'"),
        ("{{ range(10 ** 8) | list }}", "OverflowError: Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.nothing.at.all }}", "has no attribute 'nothing'"),
    ],
)
def test_a_missing_or_failing_template_is_a_data_error(template, found):
    with pytest.raises(DataError, match=f"chat template.*{found}" if template else found):
        prompt_token_ids([USER], character_tokenizer(chat_template=template))


@pytest.mark.parametrize(
    ("found", "template"),
    [
        (TOO_SLOW, "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = j %}{% endfor %}{% endfor %}"),
        (TOO_SLOW, "{{ 10 ** (10 ** 8) }}"),
        (
            TOO_BIG,
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        ),
        (TOO_BIG, "{{ 'x' * 10 ** 10 }}"),
    ],
)
def test_a_template_that_loops_or_fills_the_memory_is_a_data_error(monkeypatch, tmp_path, tokenizer, found, template):
    monkeypatch.setattr(module, "MEMORY_BYTES", 256 << 20)
    if found == TOO_SLOW:
        monkeypatch.setattr(module, "ROW_SECONDS", 1.0)
    with pytest.raises(DataError, match=rf"{found}.*data\.chat_template=FILE to another template"):
        prompt_token_ids([USER], character_tokenizer(chat_template=template))
    (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(DataError, match="chat template"):
        with_chat_template(tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))


def test_results_come_back_in_order():
    assert with_limits(lambda row: row * "ab", range(300)) == [row * "ab" for row in range(300)]
    assert with_limits(str, []) == []


def test_a_template_that_takes_over_its_process_cannot_make_the_parent_unpickle_anything(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "unpickled",)

    def forge(row: int) -> None:
        frame = sys._getframe()
        while "sender" not in frame.f_locals and frame.f_back is not None:
            frame = frame.f_back
        frame.f_locals["sender"].send(Attack())

    with pytest.raises(DataError, match="row 1, or crashed"):
        with_limits(forge, [0])
    assert not list(tmp_path.iterdir())
