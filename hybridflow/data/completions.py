"""A prompt and what is to follow it, as token ids: what demonstrations and preferences have in common."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data
from hybridflow.data.chat import Message, Prompt, rendered, rendered_in_time, rendered_prompt, text_token_ids
from hybridflow.data.long_rows import check_left, rows_within
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demonstration:
    """A prompt and what is to follow it. An empty prompt means that the whole text is to be learnt.

    Of a completion in several turns the assistant's are learnt, and the others only read.
    """

    prompt: Prompt
    completion: str | list[Message]
    place: str = ""
    """`row 3 of 'train.jsonl'`, for errors."""


@dataclass(frozen=True)
class TokenisedCompletions:
    """Token ids of each row's prompt and response, and a mask [R] with 1 on the response's tokens to be learnt."""

    prompts: list[list[int]]
    responses: list[list[int]]
    masks: list[list[float]]


def completion_token_ids(
    demonstrations: Sequence[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int] = (),
    *,
    most_tokens: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts' and responses' token ids, as `tokenised_completions` makes them."""
    found = tokenised_completions(demonstrations, tokenizer, ends, most_tokens=most_tokens)
    return found.prompts, found.responses


def tokenised_completions(
    demonstrations: Sequence[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int] = (),
    *,
    most_tokens: int | None = None,
) -> TokenisedCompletions:
    """Each row is tokenised as one text, cut where the tokens of what is given end and those to be learnt begin.

    Where a token would straddle a cut, the pieces are tokenised apart, as generation would see them. A response ends
    where a sampled one would: with one of `ends`, the token ids at which the model stops, or with the tokenizer's
    end-of-sequence, which is appended where none of them is there. Of a row whose beginning alone is longer than
    `most_tokens` only that is tokenised.
    """
    eos = _end_of_sequence(tokenizer)
    all_pieces = _all_pieces(demonstrations, tokenizer)
    prefixes = [[*accumulate(pieces)] for pieces in all_pieces]
    streams = {}
    for is_chat in (False, True):
        rows = [row for row, found in enumerate(demonstrations) if _is_chat(found) is is_chat]
        texts = [text for row in rows for text in prefixes[row]]
        ids = text_token_ids(texts, tokenizer, add_special_tokens=not is_chat, most_tokens=most_tokens)
        streams[is_chat] = iter(ids)
    prompts, responses, masks = [], [], []
    straddling = 0
    for demonstration, pieces in zip(demonstrations, all_pieces, strict=True):
        grown = [next(streams[_is_chat(demonstration)]) for _ in pieces]
        if not demonstration.prompt:
            grown[0] = grown[1][:1]
        cut = _differences(grown)
        if cut is None:
            straddling += 1
            apart = text_token_ids(pieces[1:], tokenizer, add_special_tokens=False, most_tokens=most_tokens)
            cut = [grown[0], *apart]
        prompt, *rest = cut
        if not rest[-1] or rest[-1][-1] not in {eos, *ends}:
            rest[-1] = [*rest[-1], eos]
        prompts.append(prompt)
        responses.append([token for piece in rest for token in piece])
        masks.append([float(index % 2 == 0) for index, piece in enumerate(rest) for _ in piece])
    if straddling:
        logger.info("data rows=%d are tokenised apart: a token would straddle prompt and completion", straddling)
    return TokenisedCompletions(prompts, responses, masks)


def longest_row_tokens(config: Data) -> int:
    """Tokens of the longest prompt and response that the limits let stay."""
    return config.max_prompt_tokens + config.max_response_tokens


def rows_within_limits(
    prompts: list[list[int]], responses: list[list[int]], config: Data, *, places: Sequence[str]
) -> list[int]:
    """Positions of the rows within `data.max_prompt_tokens` and `data.max_response_tokens`; `places` are for errors."""
    drop, place = config.drop_long_prompts, places.__getitem__
    lengths = [len(row) for row in prompts], [len(row) for row in responses]
    limits = config.max_prompt_tokens, config.max_response_tokens
    keys = "data.max_prompt_tokens", "data.max_response_tokens"
    short = rows_within(lengths[0], limits[0], setting=keys[0], what="prompts", drop=drop, place=place)
    within = rows_within(lengths[1], limits[1], setting=keys[1], what="completions", drop=drop, place=place)
    kept = sorted(set(short) & set(within))
    check_left(len(kept), len(prompts), settings=" or ".join(keys))
    return kept


def _is_chat(demonstration: Demonstration) -> bool:
    return isinstance(demonstration.prompt, list)


def _differences(grown: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """What each row of ids adds to the one before; None where one does not begin with the one before."""
    added = [[*grown[0]]]
    for before, after in pairwise(grown):
        if list(after[: len(before)]) != list(before):
            return None
        added.append([*after[len(before) :]])
    return added


def _all_pieces(demonstrations: Sequence[Demonstration], tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """The pieces of each row; conversations, which go through the chat template, are rendered in limited time."""
    chats = [found for found in demonstrations if _is_chat(found)]
    of_chats = iter(rendered_in_time(lambda found: _pieces(found, tokenizer), chats))
    return [next(of_chats) if _is_chat(found) else _pieces(found, tokenizer) for found in demonstrations]


def _pieces(demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of a row as the model is to see it: given, learnt, given, learnt, ..."""
    prompt, completion = demonstration.prompt, demonstration.completion
    if isinstance(prompt, str):
        assert isinstance(completion, str), f"a text prompt with the completion {completion}"
        return [prompt, completion]
    turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    first = len(prompt)
    if prompt[-1]["role"] == "assistant":  # a reply that is begun in the prompt, and goes on
        turns = [{**turns[0], "content": prompt[-1]["content"] + turns[0]["content"]}, *turns[1:]]
        first -= 1
    conversation = [*prompt[:first], *turns]
    pieces, text = [], ""
    for turn in range(first, len(conversation)):
        if conversation[turn]["role"] != "assistant":
            continue
        before = prompt if turn == first else conversation[:turn]
        head = rendered_prompt(before, tokenizer)
        whole = rendered(conversation[: turn + 1], tokenizer).rstrip()
        _check_prefix(text, head, turn, demonstration)
        _check_prefix(head, whole, turn, demonstration)
        pieces += [head[len(text) :], whole[len(head) :]]
        text = whole
    return pieces


def _check_prefix(before: str, after: str, turn: int, demonstration: Demonstration) -> None:
    """What the template makes of some turns must stay as it is when others follow: generation appends to it."""
    if after.startswith(before):
        return
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    start = max(same - 20, 0)
    raise DataError(
        f"The chat template does not keep prefixes: at turn {turn + 1} of {demonstration.place or 'a row'} what was"
        f" {before[start : same + 30]!r} becomes {after[start : same + 30]!r} as the conversation goes on.",
        remedy="Set data.chat_template=FILE to a template that only ever adds to what it made (one that leaves"
        " thinking, dates and earlier turns as they are).",
    )


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> int:
    eos = tokenizer.eos_token_id
    if isinstance(eos, int):
        return eos
    raise DataError(
        "The tokenizer has no end-of-sequence token, so a model could not learn to stop.",
        remedy="Set model.tokenizer_path to a tokenizer with one.",
    )
