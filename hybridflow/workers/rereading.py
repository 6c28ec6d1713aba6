"""What a policy wrote, read again in the tokens of a model that has its own."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.data.chat import rendered, text_token_ids
from hybridflow.models.tokenizers import decode_responses

Message = Mapping[str, str]


def reread(
    batch: Batch, *, writer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase, is_decoder: bool
) -> Ragged:
    """Prompts and responses as one sequence per row in the reader's tokens.

    A conversation goes through the reader's own chat template, which closes the reply, also one that broke off; without
    a template its turns are laid one below the other. Text is read as it is, with the special tokens that the reader
    puts around; for a decoder an end-of-sequence follows a response that did not break off, and no other.
    """
    responses = decode_responses(writer, batch.tokens("response_ids"))
    broken = batch.row("truncated").tolist() if "truncated" in batch else [False] * len(batch)
    rows = [
        _ids(prompt, response, reader, is_decoder=is_decoder, is_broken=is_broken)
        for prompt, response, is_broken in zip(batch.object("prompt"), responses, broken, strict=True)
    ]
    return Ragged.from_rows(rows, torch.int64)


def _ids(
    prompt: str | list[Message],
    response: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_decoder: bool,
    is_broken: bool,
) -> list[int]:
    if not isinstance(prompt, str) and tokenizer.chat_template is not None:
        text = rendered(_answered(prompt, response), tokenizer)
        return text_token_ids([text], tokenizer, add_special_tokens=False)[0]
    turns = (
        [prompt + response] if isinstance(prompt, str) else [turn["content"] for turn in _answered(prompt, response)]
    )
    text = "\n".join(turns)
    if not is_decoder:
        found: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return found
    ids = text_token_ids([text], tokenizer, add_special_tokens=True)[0]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if isinstance(eos, int) and not is_broken else ids


def _answered(prompt: list[Message], response: str) -> list[dict[str, str]]:
    """The conversation with the reply, which goes on where the prompt's last turn is the assistant's own."""
    turns = [dict(turn) for turn in prompt]
    if turns[-1]["role"] == "assistant":
        return [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + response}]
    return [*turns, {"role": "assistant", "content": response}]
