"""Token ids of prompts, and of prompts with their completions."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

from hybridflow.data.chat_template import rendered, rendered_prompt, with_limits
from hybridflow.data.conversations import Prompt, Response, common_length, is_learned
from hybridflow.errors import DataError
from hybridflow.observability.slow_work import SlowWork

logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 1024
_CHARACTERS_PER_TOKEN = 32
"""Far more than in texts of any language, but not than in runs of spaces."""


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and the completion to learn; with an empty prompt the whole text is learned.

    Of a completion in several turns only the assistant's turns are learned, but not those with a weight of 0; the
    others are context.
    """

    prompt: Prompt
    completion: Response
    place: str = ""
    """`row 3 of 'train.jsonl'`, for errors."""


@dataclass(frozen=True)
class TokenizedCompletions:
    """Token ids of each row's prompt and response, and a mask [R] with 1 on the response tokens to learn."""

    prompts: list[list[int]]
    responses: list[list[int]]
    masks: list[list[float]]


def prompt_token_ids(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None
) -> list[list[int]]:
    """Token ids of each prompt, or only of its beginning if that has more than `max_tokens` tokens.

    A text gets the special tokens that the tokenizer puts in front (and none at the end); a conversation gets those of
    the chat template, whose generation prompt opens the reply; if the last turn is the assistant's, it is continued.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = with_limits(
        lambda prompt: rendered_prompt(prompt, tokenizer), [prompt for prompt in prompts if not isinstance(prompt, str)]
    )
    text_ids = iter(text_token_ids(texts, tokenizer, add_special_tokens=True, max_tokens=max_tokens))
    chat_ids = iter(text_token_ids(chats, tokenizer, add_special_tokens=False, max_tokens=max_tokens))
    return [next(text_ids) if isinstance(prompt, str) else next(chat_ids) for prompt in prompts]


def text_token_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool, max_tokens: int | None = None
) -> list[list[int]]:
    """Token ids of each text, without the end-of-sequence token that some tokenizers append, since a reply follows.

    If the beginning of a text has more than `max_tokens` tokens, the rest is not tokenized.
    """
    if not texts:
        return []
    if max_tokens is not None:
        texts = [_beginning(text, max_tokens, tokenizer) for text in texts]
    ids: list[list[int]] = []
    work = SlowWork("tokenizing", "texts", len(texts))
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = list(texts[start : start + _TEXTS_AT_ONCE])
        ids += _ids_of(some, tokenizer, add_special_tokens=add_special_tokens)
        work.reach(len(ids))
    if add_special_tokens and _appends_eos(tokenizer, texts):
        return [row[:-1] for row in ids]
    return ids


def may_be_cut(prompt: str | Sequence[Mapping[str, object]], max_tokens: int) -> bool:
    """Whether a prompt has so many characters that `max_tokens` may have kept its end from being tokenized."""
    texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    return sum(map(len, texts)) > max_tokens * _CHARACTERS_PER_TOKEN


def completion_token_ids(
    rows: Sequence[PromptCompletion],
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int] = (),
    *,
    max_tokens: int | None = None,
    is_part: bool = False,
) -> TokenizedCompletions:
    """Each row is tokenized as one text, and the ids are cut between the parts that are context and those to learn.

    If a token would straddle a cut, the parts are tokenized separately, as generation would see them. A response ends
    as a sampled one would: with one of `stop_ids`, at which the model stops, or with the tokenizer's end-of-sequence,
    which is appended if neither is there. If the beginning of a row has more than `max_tokens` tokens, the rest is not
    tokenized. Nothing is logged for parts of a stream.
    """
    eos = _end_of_sequence(tokenizer)
    all_pieces = _all_pieces(rows, tokenizer)
    prefixes = [[*accumulate(pieces)] for pieces in all_pieces]
    streams = {}
    for is_chat in (False, True):
        texts = [text for row, found in enumerate(rows) if _is_chat(found) is is_chat for text in prefixes[row]]
        streams[is_chat] = iter(text_token_ids(texts, tokenizer, add_special_tokens=not is_chat, max_tokens=max_tokens))
    prompts, responses, masks = [], [], []
    straddling = 0
    for row, pieces in zip(rows, all_pieces, strict=True):
        grown = [next(streams[_is_chat(row)]) for _ in pieces]
        if not row.prompt:
            grown[0] = grown[1][:1]
        cut = _differences(grown)
        if cut is None:
            straddling += 1
            rest_ids = text_token_ids(pieces[1:], tokenizer, add_special_tokens=False, max_tokens=max_tokens)
            cut = [grown[0], *rest_ids]
        prompt, *rest = cut
        if not rest[-1] or rest[-1][-1] not in {eos, *stop_ids}:
            rest[-1] = [*rest[-1], eos]
        prompts.append(prompt)
        responses.append([token for piece in rest for token in piece])
        masks.append([float(index % 2 == 0) for index, piece in enumerate(rest) for _ in piece])
    if straddling and not is_part:
        logger.info("data rows=%d tokenized in parts: a token would straddle prompt and completion", straddling)
    return TokenizedCompletions(prompts, responses, masks)


def _beginning(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, or its beginning if that alone has more than `max_tokens` tokens, however the text continues.

    A continuation joins at most the last characters of a beginning into other tokens: fewer than the longest token has.
    """
    size = max(1, max_tokens) * _CHARACTERS_PER_TOKEN
    if size >= len(text):
        return text
    enough = max_tokens + max(map(len, tokenizer.get_vocab()))
    while size < len(text):
        (ids,) = _ids_of([text[:size]], tokenizer, add_special_tokens=False)
        if len(ids) > enough:
            return text[:size]
        size *= 2
    return text


def _ids_of(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    try:
        return tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    except Exception as error:  # the only kind that tokenizers raises, for example for an unknown character
        raise DataError(
            f"The tokenizer cannot read a text: {type(error).__name__}: {str(error)[:300].rstrip('.')}.",
            remedy="Set model.tokenizer_path to a tokenizer that knows all characters of the data.",
        ) from error


def _appends_eos(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> bool:
    """Tested with a character that the tokenizer has encoded; it may not know any other."""
    probe = next((text[:1] for text in texts if text), "a")
    (ids,) = _ids_of([probe], tokenizer, add_special_tokens=True)
    return tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]


def _is_chat(row: PromptCompletion) -> bool:
    return isinstance(row.prompt, list)


def _differences(grown: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The ids that each list adds to the one before; None if one does not begin with the one before."""
    added = [[*grown[0]]]
    for before, after in pairwise(grown):
        if list(after[: len(before)]) != list(before):
            return None
        added.append([*after[len(before) :]])
    return added


def _all_pieces(rows: Sequence[PromptCompletion], tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """The text pieces of each row; conversations are rendered by the chat template."""
    chats = iter(with_limits(lambda row: _pieces(row, tokenizer), [row for row in rows if _is_chat(row)]))
    return [next(chats) if _is_chat(row) else _pieces(row, tokenizer) for row in rows]


def _pieces(row: PromptCompletion, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of a row as the model sees it, in pieces: context, learned, context, learned, ..."""
    prompt, completion = row.prompt, row.completion
    if isinstance(prompt, str):
        assert isinstance(completion, str), f"a text prompt with the completion {completion}"
        return [prompt, completion]
    turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    first = len(prompt)
    if prompt[-1]["role"] == "assistant":  # the reply begins in the prompt
        turns = [{**turns[0], "content": prompt[-1]["content"] + turns[0]["content"]}, *turns[1:]]
        first -= 1
    conversation = [*prompt[:first], *turns]
    replies = [turn for turn in range(first, len(conversation)) if conversation[turn]["role"] == "assistant"]
    pieces, text = [], ""
    for turn in [turn for turn in replies if is_learned(conversation[turn])] or replies:
        head = rendered_prompt(prompt if turn == first else conversation[:turn], tokenizer)
        whole = rendered(conversation[: turn + 1], tokenizer).rstrip()
        _check_prefix(text, head, turn, row)
        _check_prefix(head, whole, turn, row)
        pieces += [head[len(text) :], whole[len(head) :]]
        text = whole
    return pieces


def _check_prefix(before: str, after: str, turn: int, row: PromptCompletion) -> None:
    """The template must render the first turns the same when others follow, since generation appends to them."""
    if after.startswith(before):
        return
    same = common_length(before, after)
    start = max(same - 20, 0)
    raise DataError(
        f"The chat template is not prefix-preserving: at turn {turn + 1} of {row.place or 'a row'},"
        f" {before[start : same + 30]!r} becomes {after[start : same + 30]!r} when the conversation continues.",
        remedy="Set data.chat_template=FILE to a template that only appends to the text of earlier turns (and leaves"
        " their thinking and dates unchanged).",
    )


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> int:
    eos = tokenizer.eos_token_id
    if isinstance(eos, int):
        return eos
    raise DataError(
        "The tokenizer has no end-of-sequence token, so a model could not learn to stop.",
        remedy="Set model.tokenizer_path to a tokenizer with one.",
    )
