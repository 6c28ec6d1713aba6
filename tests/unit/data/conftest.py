"""Tokenizers made on the fly, with one token per character; files of rows; token ids as text."""

import json
import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)


def character_tokenizer(*, before: str = "", behind: str = "", chat_template: str | None = None):
    """A character-level tokenizer; `before` and `behind` are special tokens it puts around a text."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *string.printable])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if before or behind:
        around = [(token, vocabulary[token]) for token in dict.fromkeys((before, behind)) if token]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{before} $A {behind}".strip(), special_tokens=around
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        chat_template=chat_template,
    )  # fmt: skip


def written(path: Path, rows: list[dict]) -> str:
    """The path of a JSON-lines file with these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(tokenizer, rows) -> list[str]:
    """The tokens of each row, end to end."""
    return ["".join(tokenizer.convert_ids_to_tokens(list(map(int, row)))) for row in rows]


@pytest.fixture(scope="session")
def tokenizer():
    """Characters, without special tokens around a text and without a chat template."""
    return character_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Characters, with a chat template; a text gets a beginning-of-sequence token."""
    return character_tokenizer(before="<bos>", chat_template=CHAT_TEMPLATE)
