"""Finds stop strings in the text of responses, token by token as they are sampled."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from hybridflow.batch import Ragged
from hybridflow.errors import ConfigError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_INVALID_PREFIX = "Invalid prefix encountered"
"""Begins the message of an error of `DecodeStream`, after tokens that are not UTF-8."""


def check_reads_text(tokenizer: PreTrainedTokenizerBase, *, key: str) -> TokenizersBackend:
    """The tokenizer, which must decode token by token; raises `ConfigError` otherwise. `key` is the setting."""
    if not isinstance(tokenizer, TokenizersBackend):
        raise ConfigError(
            f"{key} needs a tokenizer of the tokenizers library; {type(tokenizer).__name__} is not one.",
            remedy="Give a tokenizer.json in model.tokenizer_path, or use stop_token_ids.",
        )
    return tokenizer


class StopSearch:
    """Where each response first contains one of `stop`, in text decoded with special tokens.

    A response ends with the token that completes the stop string; the string may begin in an earlier token, and text
    may follow it in the same token. Bytes of an incomplete character count once the character is complete. vLLM applies
    the same rule to the same text, so that both engines end a response at the same token.

        search = StopSearch(tokenizer, ["</answer>"], prompts)
        is_unfinished = search.read(rows, tokens, count)
        search.lengths(otherwise=max_tokens)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompts: Ragged) -> None:
        self._backend = check_reads_text(tokenizer, key="rollout.sampling.stop").backend_tokenizer
        self._stop = tuple(stop)
        self._overlap = max(map(len, stop)) - 1
        self._streams = [DecodeStream(ids=row.tolist(), skip_special_tokens=False) for row in prompts.rows()]
        self._begun = [self._begun_text(row.tolist()) for row in prompts.rows()]
        self._ends_of_text = [""] * len(prompts)
        self._num_read = 0
        self._lengths: list[int | None] = [None] * len(prompts)

    def read(self, rows: Int64[Tensor, " K"], tokens: Int64[Tensor, "B R"], count: int) -> Bool[Tensor, " K"]:
        """Reads the first `count` tokens of the given rows; returns whether each has no stop string yet, on the host.

        The rows of later calls must be among those of earlier calls.
        """
        new = tokens[rows.to(tokens.device), self._num_read : count].tolist()
        numbers = rows.tolist()
        for row, ids in zip(numbers, new, strict=True):
            if self._lengths[row] is None:
                self._lengths[row] = self._end(row, ids)
        self._num_read = count
        return torch.tensor([self._lengths[row] is None for row in numbers], dtype=torch.bool)

    def lengths(self, otherwise: int) -> Int64[Tensor, " B"]:
        """Tokens of each response up to and including the one that completed its stop string, [B]; `otherwise` for a
        response without one."""
        return torch.tensor([otherwise if length is None else length for length in self._lengths])

    def _end(self, row: int, ids: Sequence[int]) -> int | None:
        for number, token in enumerate(ids, start=self._num_read + 1):
            text = self._ends_of_text[row] + self._text(row, token)
            if any(stop in text for stop in self._stop):
                return number
            self._ends_of_text[row] = text[-self._overlap :] if self._overlap else ""
        return None

    def _begun_text(self, prompt: list[int]) -> str:
        """The text of a prompt that ends inside a character, which `DecodeStream` returns with the rest of it."""
        text = self._backend.decode(prompt, skip_special_tokens=False)
        return text.rstrip(_REPLACEMENT) if text.endswith(_REPLACEMENT) else ""

    def _text(self, row: int, token: int) -> str:
        """The text that a token adds; empty while a character is incomplete."""
        try:
            text = self._streams[row].step(self._backend, token) or ""
            if text and self._begun[row]:
                text, self._begun[row] = text.removeprefix(self._begun[row]), ""
            return text
        except Exception as error:  # the library raises no narrower class
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._streams[row] = DecodeStream(skip_special_tokens=False)
            return self._streams[row].step(self._backend, token) or ""
