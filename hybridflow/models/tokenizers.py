"""Tokenizers: loads and checks them (padding, end of sequence, vocabulary), and decodes responses."""

import itertools
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.batch.ragged import Ragged
from hybridflow.config.json_text import read_json_object
from hybridflow.errors import EngineError
from hybridflow.models.geometry import text_config
from hybridflow.models.loading import one_line


def load_tokenizer(directory: Path, *, pad_token: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in a directory; `pad_token` must name an existing token if it has no padding token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers checks little, and fails in as many ways as a file can be wrong
        raise EngineError(
            f"No tokenizer can be loaded from {directory}: {one_line(error)}.",
            remedy="Set model.tokenizer_path to the directory that holds the tokenizer's files.",
        ) from error
    if pad_token is not None:
        _set_pad(tokenizer, pad_token, directory)
    if tokenizer.pad_token_id is None:
        eos = tokenizer.eos_token
        advice = f"Set model.pad_token='{eos}' (its end-of-sequence token)" if eos else "Set model.pad_token"
        raise EngineError(
            f"The tokenizer in {directory} has no padding token.", remedy=f"{advice}, or any token in its vocabulary."
        )
    return tokenizer


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the padding token, which `load_tokenizer` has checked."""
    token = tokenizer.pad_token_id
    assert isinstance(token, int), f"pad_token_id is {token!r}"
    return token


def eos_ids(tokenizer: PreTrainedTokenizerBase, directory: Path) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's, then those of `generation_config.json` and `config.json`."""
    own = tokenizer.eos_token
    found: list[int] = [tokenizer.get_vocab()[own]] if isinstance(own, str) else []
    for name in ("generation_config.json", "config.json"):
        found += _declared_eos(directory, name)
    if not found:
        raise EngineError(
            f"Neither the tokenizer nor the model in {directory} has an end-of-sequence token: no response would end.",
            remedy="Add eos_token_id to its generation_config.json.",
        )
    return tuple(dict.fromkeys(found))


def _declared_eos(directory: Path, name: str) -> list[int]:
    """The end-of-sequence ids in a file of a model's directory; raises if one is not a token of the model."""
    path = directory / name
    try:
        declared = read_json_object(path).get("eos_token_id") if path.is_file() else None
        vocabulary = text_config(read_json_object(directory / "config.json")).get("vocab_size")
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path} cannot be read: {one_line(error)}.", remedy="Correct the file, or remove it."
        ) from error
    found = declared if isinstance(declared, list) else [] if declared is None else [declared]
    highest = vocabulary - 1 if type(vocabulary) is int else None
    for token in found:
        if type(token) is not int or token < 0 or (highest is not None and token > highest):
            raise EngineError(
                f"{path} has eos_token_id={str(declared)[:80]}, but {str(token)[:40]!r} is not a token of the model.",
                remedy=f"Use token ids from 0 to {'the last of the vocabulary' if highest is None else highest}.",
            )
    return found


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, directory: Path) -> None:
    """Raises `EngineError` if the tokenizer has ids that the model's embedding does not; it may have more rows."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= embedding_rows:
        raise EngineError(
            f"The tokenizer has ids up to {highest}, but the model in {directory} embeds only {embedding_rows} tokens.",
            remedy="Set model.tokenizer_path to the tokenizer the model was trained with.",
        )


def decode_responses(tokenizer: PreTrainedTokenizerBase, ids: Ragged) -> list[str]:
    """The text of each row of token ids, without special tokens."""
    flat, ends = ids.values.tolist(), ids.offsets.tolist()
    rows = [flat[start:stop] for start, stop in itertools.pairwise(ends)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _set_pad(tokenizer: PreTrainedTokenizerBase, pad_token: str, directory: Path) -> None:
    if pad_token not in tokenizer.get_vocab():
        known = ", ".join(repr(token) for token in tokenizer.all_special_tokens) or "none"
        raise EngineError(
            f"model.pad_token='{pad_token}' is not in the vocabulary of the tokenizer in {directory}.",
            remedy=f"Use a token in its vocabulary; its special tokens: {known}.",
        )
    tokenizer.pad_token = pad_token
