"""The built-in model's shape, tokenizer and data, as committed."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybridflow.config.paths import builtin_path
from hybridflow.models.tokenizers import check_vocabulary, eos_ids, load_tokenizer
from recipes.tiny_calculator import CHARACTERS, make_data, make_pairs, make_shape

MODEL = builtin_path("builtin:calculator")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in builtin_path(f"calculator/{name}").read_text().splitlines()]


def test_the_recipe_makes_the_committed_data(tmp_path):
    make_data(tmp_path)
    make_pairs(tmp_path)
    for name in ("train", "eval", "pairs", "eval_pairs"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == builtin_path(f"calculator/{name}").read_bytes()


def test_the_recipe_makes_the_committed_shape(tmp_path):
    make_shape(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (MODEL / "tokenizer.json").read_text()
    for name in ("config.json", "generation_config.json"):
        assert settings(tmp_path / name) == settings(MODEL / name)


def test_the_data_is_every_sum_once_and_right():
    prompts = [row["prompt"] for row in rows("train") + rows("eval")]
    assert sorted(prompts) == sorted(f"{a}+{b}=" for a in range(100) for b in range(100))
    for row in rows("train") + rows("eval"):
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)


def test_pairs_prefer_the_right_answer_to_one_of_as_many_digits():
    sums = {name: {row["prompt"]: row["answer"] for row in rows(name)} for name in ("train", "eval")}
    for name, source in (("pairs", "train"), ("eval_pairs", "eval")):
        for row in rows(name):
            assert row["chosen"] == sums[source][row["prompt"]]
            assert row["rejected"] != row["chosen"] and len(row["rejected"]) == len(row["chosen"])


def test_no_held_out_sum_was_trained_on_in_either_order():
    def unordered(name: str) -> set[frozenset[str]]:
        return {frozenset(row["prompt"].removesuffix("=").split("+")) for row in rows(name)}

    assert len(rows("eval")) == 512
    assert not unordered("train") & unordered("eval")


@pytest.mark.parametrize("text", [CHARACTERS, "12+34=", "", "two  spaces\n\nand lines "])
def test_the_tokenizer_gives_every_text_of_its_alphabet_back(text):
    tokenizer = load_tokenizer(MODEL)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer_has_64_tokens_with_pad_and_end_of_sequence():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert len(tokenizer) == 64
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")
    assert eos_ids(tokenizer, MODEL) == (1,)
    check_vocabulary(tokenizer, 64, MODEL)
    assert tokenizer.encode("~") == [tokenizer.unk_token_id]


def settings(path: Path) -> dict[str, object]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "transformers_version"}
