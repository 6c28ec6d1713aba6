"""Finds stop strings in the text of responses, token by token as they are sampled."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, TokenizersBackend

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
    """Where a response first contains one of `stop`, in text decoded with special tokens.

    A response ends with the token that completes the stop string; the string may begin in an earlier token, and text
    may follow it in the same token. Bytes of an incomplete character count once the character is complete. vLLM applies
    the same rule to the same text, so that both engines end a response at the same token.

        search = StopSearch(tokenizer, ["</answer>"], prompt)
        search.read(tokens)
        search.length
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self._backend = check_reads_text(tokenizer, key="rollout.sampling.stop").backend_tokenizer
        self._stop = tuple(stop)
        self._overlap = max(map(len, stop)) - 1
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        self._begun = self._begun_text(list(prompt))
        self._end_of_text = ""
        self._num_read = 0
        self.length: int | None = None
        """Tokens up to and including the one that completed a stop string; None if there is none yet."""

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the response."""
        for token in tokens if self.length is None else ():
            self._num_read += 1
            text = self._end_of_text + self._text(token)
            if any(stop in text for stop in self._stop):
                self.length = self._num_read
                return
            self._end_of_text = text[-self._overlap :] if self._overlap else ""

    def _begun_text(self, prompt: list[int]) -> str:
        """The text of a prompt that ends inside a character, which `DecodeStream` returns with the rest of it."""
        text = self._backend.decode(prompt, skip_special_tokens=False)
        return text.rstrip(_REPLACEMENT) if text.endswith(_REPLACEMENT) else ""

    def _text(self, token: int) -> str:
        """The text that a token adds; empty while a character is incomplete."""
        try:
            text = self._stream.step(self._backend, token) or ""
            if text and self._begun:
                text, self._begun = text.removeprefix(self._begun), ""
            return text
        except Exception as error:  # the library raises no narrower class
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._backend, token) or ""
