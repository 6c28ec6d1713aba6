"""The tokenizer of the toy models."""

import pytest
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def tokenizer(toy_dir):
    return AutoTokenizer.from_pretrained(toy_dir("llama"))
