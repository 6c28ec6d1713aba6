"""Tokenizers: what is checked before a run, and decoding."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import EngineError
from hybridflow.models.tokenizers import check_vocabulary, decode_responses, eos_ids, load_tokenizer


def saved(tokenizer, directory: Path) -> Path:
    tokenizer.save_pretrained(directory)
    return directory


def test_a_pad_token_can_be_chosen(make_tokenizer, tmp_path):
    directory = saved(make_tokenizer(eos_token="</s>"), tmp_path)
    tokenizer = load_tokenizer(directory, pad_token="<pad>")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    assert load_tokenizer(directory, pad_token="</s>").pad_token_id == 1


@pytest.mark.parametrize(
    ("damage", "settings", "words"),
    [
        (None, {}, r"model\.pad_token='</s>'"),
        (None, {"pad_token": "<none>"}, r"model.pad_token='<none>'.*special tokens: '</s>'"),
        ("absent", {}, r"model\.tokenizer_path"),
        ('{"version": ', {}, r"model\.tokenizer_path"),
    ],
    ids=["no padding token", "unknown padding token", "no tokenizer", "damaged file"],
)
def test_a_tokenizer_that_cannot_be_used_is_an_error_that_names_the_setting(
    make_tokenizer, tmp_path, damage, settings, words
):
    if damage != "absent":
        saved(make_tokenizer(eos_token="</s>"), tmp_path)
    if damage not in (None, "absent"):
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(EngineError, match=words):
        load_tokenizer(tmp_path, **settings)


def test_every_declared_end_of_sequence_ends_a_response(make_tokenizer, tmp_path):
    directory = saved(make_tokenizer(pad_token="<pad>", eos_token="</s>"), tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert eos_ids(make_tokenizer(eos_token="</s>"), directory) == (1, 7, 9)


def test_no_end_of_sequence_anywhere_is_an_error(make_tokenizer, tmp_path):
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        eos_ids(make_tokenizer(pad_token="<pad>"), tmp_path)


def test_a_vocabulary_larger_than_the_embedding_is_an_error(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="</s>")
    check_vocabulary(tokenizer, 64, tmp_path)
    check_vocabulary(tokenizer, len(tokenizer), tmp_path)
    with pytest.raises(EngineError, match=rf"ids up to {len(tokenizer) - 1}.*model\.tokenizer_path"):
        check_vocabulary(tokenizer, len(tokenizer) - 1, tmp_path)


def test_responses_are_decoded_row_by_row_without_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="</s>")
    texts = ["46", "", "a b", "9"]
    rows = [[*tokenizer.encode(text), 1, 0] for text in texts]
    rows[1] = []
    ids = Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
    assert decode_responses(tokenizer, ids) == texts
