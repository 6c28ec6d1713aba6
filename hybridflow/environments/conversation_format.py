"""The text of conversations: how a prompt begins, and what is appended to it after each reply."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from hybridflow.data.chat_template import rendered, with_limits
from hybridflow.data.conversations import common_length
from hybridflow.data.tokenization import text_token_ids
from hybridflow.environments.interface import Message, Tool
from hybridflow.environments.messages import ROLES, call_id
from hybridflow.errors import DataError

T = TypeVar("T")

REPLY = "zReplyOfTheModelz"
THOUGHT = "zThoughtOfTheModelz"
"""Placeholders for sampled text. The text of a reply is never rendered, because its token ids are known."""

LONGEST_KNOWN = 4096
"""Conversations and texts of at most so many characters are rendered and encoded once: short ones recur."""


class Continuation(StrEnum):
    """How the chat template continues a conversation after a reply.

    append: a reply that ends with the end-of-turn token is followed by the next messages.
    bridge: further text of the template, such as a newline, must be inserted between them.
    fork: the template renders earlier turns differently once others follow, so each turn begins a new sequence.
    """

    append = "append"
    bridge = "bridge"
    fork = "fork"


@dataclass(frozen=True)
class TemplateCheck:
    """The finding about a chat template."""

    continuation: Continuation
    detail: str = ""
    """The inserted text (bridge), or the first difference (fork)."""

    drops_thoughts: bool = False
    """Whether the template drops `<think>...</think>` from earlier replies, so that such a reply forks."""


class ConversationFormat:
    """Renders conversations by the tokenizer's chat template or, with `is_chat=False`, by concatenating the contents.

    `end_ids` are the tokens that end a response. If the beginning of a text has more than `max_tokens` tokens, the rest
    is not tokenized.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        *,
        is_chat: bool,
        max_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._max_tokens = max_tokens
        self.end_ids = frozenset(end_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = frozenset(number for number, token in added if token.special) - self.end_ids
        self._end_texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self.end_ids)]
        self._known_texts: dict[str, str] = {}
        """Rendered conversations, by their messages and tools as JSON."""

        self._known_ids: dict[str, list[int]] = {}

    def clear_cache(self) -> None:
        """Clears the cache of rendered conversations and encoded texts; a template may show the date, for example."""
        self._known_texts.clear()
        self._known_ids.clear()

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text of a conversation up to where the next reply begins.

        Raises `DataError` if the template refuses it, and for a role that neither `ROLES` nor the template has.
        """
        if not self._is_chat:
            return "".join(str(message["content"]) for message in messages)
        try:
            key = json.dumps([[*messages], [*tools]])
        except (TypeError, ValueError, RecursionError):  # such as the objects of images, for a template that shows them
            return self._rendered(messages, tools)
        return _computed_once(self._known_texts, key, lambda: self._rendered(messages, tools))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids of a whole prompt, for a conversation without a reply whose tokens are known."""
        text = self.prompt_text(messages, tools)
        return self._ids(text, add_special_tokens=not self._is_chat)

    def continuation_ids(self, before: str, after: str, reply: Message, reply_ids: Sequence[int]) -> list[int] | None:
        """Token ids between a reply and the next one; None if the template has changed the text up to the reply.

        `before` is the text of the prompt that was replied to, and `after` that of the prompt that follows, both with
        placeholders for replies; `reply` is the placeholder of this one. `reply_ids` are the tokens of the reply: the
        special tokens at its end with which the continuation begins are not repeated.
        """
        text = self._continuation(before, after, reply)
        if text is None:
            return None
        has_ended = reply_ids[-1] in self.end_ids
        ids = self._continuation_ids(text.lstrip() if has_ended else text)
        most = min(len(self._leading_marks(ids)), len(reply_ids))
        same = next((size for size in range(most, 0, -1) if [*reply_ids[-size:]] == ids[:size]), 0)
        return ids[same:] if same or not has_ended else self._continuation_ids(text)

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of a reply without the tokens that end a turn; other special tokens are kept, for parsers."""
        text = self._tokenizer.decode(
            [*self._without_end(ids)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), f"one sequence decoded to {type(text)}"
        return text

    def special_token(self, ids: Sequence[int]) -> str | None:
        """The first special token in a reply, except those that end it; None if there is none."""
        found = next((token for token in self._without_end(ids) if token in self._special_ids), None)
        return None if found is None else str(self._tokenizer.convert_ids_to_tokens(found))

    def check(self) -> TemplateCheck:
        """How the template continues a conversation, found with conversations of three replies.

        Raises `DataError` if the tokenizer has no chat template, or if the template refuses these conversations.
        """
        if not self._is_chat:
            return TemplateCheck(Continuation.append)
        (found,) = with_limits(lambda _: self._found(), [None])
        return TemplateCheck(Continuation(found[0]), *found[1:])

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        self._check_roles(messages)
        return rendered(messages, self._tokenizer, add_generation_prompt=True, tools=tools)

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Many templates show messages of any role, so that a misspelled one would be trained on."""
        for place, message in enumerate(messages):
            role = str(message["role"])
            if role not in ROLES and role not in str(self._tokenizer.chat_template):
                raise DataError(
                    f"messages[{place}] has the role '{role}', which the chat template does not know.",
                    remedy=f"Use one of: {', '.join(ROLES)}.",
                )

    def _found(self) -> tuple[str, str, bool]:
        plain, thinking = placeholder("a reply"), placeholder("<think>a thought</think>a reply")
        difference = self._difference(plain)
        if difference:
            return Continuation.fork, difference, True
        text = self._after_reply()
        text = next((text.removeprefix(end) for end in self._end_texts if text.startswith(end)), text)
        bridge = text[: len(text) - len(text.lstrip())]
        kind = Continuation.bridge if bridge else Continuation.append
        return kind, repr(bridge) if bridge else "", bool(self._difference(thinking))

    def _difference(self, reply: Message) -> str:
        """The change that the template makes to a conversation with three such replies; empty if there is none."""
        turns: list[Message] = [{"role": "user", "content": "first"}]
        for _ in range(3):
            before = self.prompt_text(turns)
            turns += [reply, {"role": "user", "content": "next"}]
            after = self.prompt_text(turns)
            if self._continuation(before, after, reply) is None:
                whole = f"{before}{reply['content']}"
                same = common_length(whole, after)
                start = max(same - 20, 0)
                return f"{whole[start : same + 30]!r} becomes {after[start : same + 30]!r}"
        return ""

    def _continuation(self, before: str, after: str, reply: Message) -> str | None:
        thinks, calls_tools = THOUGHT in str(reply["content"]), "tool_calls" in reply
        rest = after[len(before) :].lstrip()
        if not after.startswith(before) or REPLY not in rest:
            return None
        if not rest.startswith(REPLY) and not thinks and not calls_tools:
            return None
        head, _, rest = rest.partition(REPLY)
        if thinks and THOUGHT not in head:
            return None
        if not calls_tools:
            return rest
        ends = [rest.find(end) for end in self._end_texts if end in rest]
        return rest[min(ends) :] if ends else None

    def _after_reply(self) -> str:
        """The text that follows a reply in a conversation of two turns; empty if the template changes the first one."""
        first: Message = {"role": "user", "content": "first"}
        reply = placeholder("a reply")
        following = self.prompt_text([first, reply, {"role": "user", "content": "next"}])
        return (self._continuation(self.prompt_text([first]), following, reply) or "").lstrip()

    @cached_property
    def _turn_end(self) -> list[int]:
        """The special tokens with which the template ends a reply, if the last is one of `end_ids`; else empty."""
        marks = self._leading_marks(self._ids(self._after_reply(), add_special_tokens=False)) if self._is_chat else []
        return next((marks[: place + 1] for place, token in enumerate(marks) if token in self.end_ids), [])

    def _leading_marks(self, ids: list[int]) -> list[int]:
        """The special tokens with which ids begin."""
        others = (place for place, token in enumerate(ids) if token not in self._special_ids | self.end_ids)
        return ids[: next(others, len(ids))]

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """A reply without the tokens that end a turn."""
        if not len(ids) or ids[-1] not in self.end_ids:
            return ids
        size = len(self._turn_end)
        return ids[:-size] if size and [*ids[-size:]] == self._turn_end else ids[:-1]

    def _continuation_ids(self, text: str) -> list[int]:
        return [*_computed_once(self._known_ids, text, lambda: self._ids(text, add_special_tokens=False))]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (ids,) = text_token_ids(
            [text], self._tokenizer, add_special_tokens=add_special_tokens, max_tokens=self._max_tokens
        )
        return ids


def _computed_once(known: dict[str, T], key: str, compute: Callable[[], T]) -> T:
    """The value of a key, which is kept in `known` unless the key is long."""
    if len(key) > LONGEST_KNOWN:
        return compute()
    if key not in known:
        known[key] = compute()
    return known[key]


def placeholder(text: str, num_calls: int = 0) -> Message:
    """The message that stands for a reply with this text, in which `num_calls` tool calls were found."""
    thought = ""
    if "</think>" in text:
        thought = f"{'<think>' if '<think>' in text else ''}\n{THOUGHT}\n</think>\n\n"
    if not num_calls:
        return {"role": "assistant", "content": thought + REPLY}
    return {"role": "assistant", "content": thought, "tool_calls": [tool_call(REPLY, {}, i) for i in range(num_calls)]}


def tool_call(
    name: str, arguments: Mapping[str, object], index: int, sampled_id: str | None = None
) -> dict[str, object]:
    """A tool call in the form that chat templates expect; its id is the one that the model sampled, if it did."""
    return {
        "id": sampled_id or call_id(index),
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }
