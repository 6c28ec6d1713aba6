"""Prompts as token ids: text as it is, conversations through the tokenizer's own chat template."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data
from hybridflow.config.paths import user_path
from hybridflow.data.watched import ROW_SECONDS, watched
from hybridflow.errors import DataError

Message = dict[str, str]
Prompt = str | list[Message]
T = TypeVar("T")
R = TypeVar("R")

_CHARACTERS_PER_TOKEN = 32
"""Far more than there are in the texts of any language, but not in runs of spaces."""

_OTHER_TEMPLATE = "Set data.chat_template=FILE to another template, or give texts instead of conversations."


def prompt_token_ids(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, most_tokens: int | None = None
) -> list[list[int]]:
    """Token ids of each prompt, or of its beginning where that alone is longer than `most_tokens`.

    Text gets the special tokens that the tokenizer itself puts in front (and none behind); a conversation gets those
    of the chat template, whose generation prompt opens the reply, or whose last assistant turn is continued.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = rendered_in_time(
        lambda prompt: rendered_prompt(prompt, tokenizer), [prompt for prompt in prompts if not isinstance(prompt, str)]
    )
    of_texts = iter(text_token_ids(texts, tokenizer, add_special_tokens=True, most_tokens=most_tokens))
    of_chats = iter(text_token_ids(chats, tokenizer, add_special_tokens=False, most_tokens=most_tokens))
    return [next(of_texts) if isinstance(prompt, str) else next(of_chats) for prompt in prompts]


def as_conversation(prompt: Prompt, config: Data) -> Prompt:
    """The prompt as the model is shown it: by `data.as_chat` a text is the user's turn, and a conversation without a
    system message gets that of `data.system_prompt`.
    """
    if isinstance(prompt, str):
        if not config.as_chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if config.system_prompt is None or prompt[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": config.system_prompt}, *prompt]


def with_chat_template(tokenizer: PreTrainedTokenizerBase, config: Data) -> PreTrainedTokenizerBase:
    """The tokenizer with the template in the file `data.chat_template` in place of its own."""
    if config.chat_template is None:
        return tokenizer
    path = user_path(config.chat_template, key="data.chat_template")
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={config.chat_template} cannot be read: {error}",
            remedy="Name a text file with a Jinja template, such as a model's chat_template.jinja.",
        ) from error
    chosen = copy(tokenizer)
    chosen.chat_template = template
    greeting = [{"role": "user", "content": "Hello"}]
    rendered_in_time(lambda turns: rendered(turns, chosen, add_generation_prompt=True), [greeting])
    return chosen


def rendered_in_time(render: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """What the chat template makes of each row; one that loops or fills the memory is a `DataError`."""
    return watched(render, rows, what="The chat template was given", remedy=_OTHER_TEMPLATE, seconds=ROW_SECONDS)


def text_token_ids(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
    most_tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of each text, without the end-of-sequence token that some tokenizers append: a reply follows.

    A text whose beginning makes more than `most_tokens` is too long whatever follows, and not tokenised further.
    """
    if not texts:
        return []
    if most_tokens is not None:
        texts = [_up_to(text, most_tokens, tokenizer) for text in texts]
    ids = _ids_of(list(texts), tokenizer, add_special_tokens=add_special_tokens)
    if add_special_tokens and _appends_eos(tokenizer, texts):
        return [row[:-1] for row in ids]
    return ids


def may_be_cut(prompt: Prompt, most_tokens: int) -> bool:
    """Whether a prompt has so many characters that `most_tokens` may have kept it from being tokenised whole."""
    texts = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    return sum(map(len, texts)) > most_tokens * _CHARACTERS_PER_TOKEN


def _up_to(text: str, most_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    beginning = text[: most_tokens * _CHARACTERS_PER_TOKEN]
    if len(beginning) == len(text):
        return text
    (ids,) = _ids_of([beginning], tokenizer, add_special_tokens=False)
    return beginning if len(ids) > most_tokens + 1 else text


def _ids_of(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    try:
        return tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    except Exception as error:  # tokenizers raises no other kind, for example for a character that it does not know
        raise DataError(
            f"The tokenizer cannot read a text: {type(error).__name__}: {str(error)[:300].rstrip('.')}.",
            remedy="Set model.tokenizer_path to a tokenizer that knows all characters of the data.",
        ) from error


def rendered_prompt(conversation: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a conversation up to where the reply begins (or goes on, when its last turn is the assistant's)."""
    continues = conversation[-1]["role"] == "assistant"
    return rendered(conversation, tokenizer, add_generation_prompt=not continues, continue_final_message=continues)


def rendered(
    conversation: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """The text that the tokenizer's chat template makes of a conversation."""
    if tokenizer.chat_template is None:
        raise DataError(
            "Rows are conversations (messages, or texts by data.as_chat=true), but the tokenizer has no chat template.",
            remedy="Set data.chat_template=FILE, use a model with a chat template, or give plain text without"
            " data.as_chat.",
        )
    try:
        text = tokenizer.apply_chat_template(
            list(conversation),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except Exception as error:  # a template is a program
        words = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"The tokenizer's chat template refuses a conversation: {words[:400].rstrip('.')}. It is:"
            f" {str(list(conversation))[:200]}",
            remedy="Write its turns the way the model's template wants them.",
        ) from error
    assert isinstance(text, str), f"the chat template made a {type(text)}"
    return text


def prompt_flaw(prompt: object) -> str | None:
    """What is wrong with a prompt, or None: it must be text, or messages with a role and content."""
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list):
        return f"is {'missing' if prompt is None else f'a {type(prompt).__name__}'}, not text or messages"
    if not prompt:
        return "is an empty conversation"
    for message in prompt:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            return f"has a message without role and content: {str(message)[:80]}"
    return None


def _appends_eos(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> bool:
    """Asked with a character that the tokenizer has read; it need not know any other."""
    probe = next((text[:1] for text in texts if text), "a")
    (ids,) = _ids_of([probe], tokenizer, add_special_tokens=True)
    return tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]
