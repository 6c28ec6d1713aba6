"""The token ids of a conversation: what the model was shown and what it sampled, never encoded again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.environments.conversation_format import ConversationFormat, placeholder
from hybridflow.environments.interface import Message, Tool
from hybridflow.errors import EpisodeError


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a reply, with their log-probabilities and the versions of the weights that sampled them."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass
class TranscriptRow:
    """A prompt and everything after it, as the model saw it; the lists of the response have one entry per token."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 for tokens that the model sampled, 0 for those of observations and of the template."""

    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of sampled tokens; 0 for all others."""

    versions: list[int] = field(default_factory=list)
    """Versions of the weights that sampled the tokens; 0 for all others."""

    replies: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each reply within the response."""

    fork_starts: list[int] = field(default_factory=list)
    """Where in the response further sequences begin, which see nothing of what is before them."""

    def append(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not sample."""
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [0] * len(ids)

    def append_reply(self, sampled: SampledTokens) -> None:
        """Appends tokens that the model sampled."""
        count, start = len(sampled.ids), len(self.response_ids)
        assert count == len(sampled.logprobs) == len(sampled.versions), f"a reply of different lengths: {sampled}"
        self.replies.append((start, start + count))
        self.response_ids += sampled.ids
        self.mask += [1] * count
        self.logprobs += sampled.logprobs
        self.versions += sampled.versions

    def joined(self, fork: "TranscriptRow") -> None:
        """Appends another row as a sequence of its own."""
        start = len(self.response_ids)
        self.fork_starts.append(start)
        self.append(fork.prompt_ids)
        shift = len(self.response_ids)
        self.response_ids += fork.response_ids
        self.mask += fork.mask
        self.logprobs += fork.logprobs
        self.versions += fork.versions
        self.replies += [(first + shift, last + shift) for first, last in fork.replies]

    def selected(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], mask: Sequence[int]
    ) -> "TranscriptRow | None":
        """A copy that ends with the last token whose mask is 1, and has this mask.

        None if its tokens are others, or if the mask is 1 for a token that the model did not sample.
        """
        end = max((place + 1 for place, one in enumerate(mask) if one), default=0)
        ids, kept = [*response_ids[:end]], [int(one) for one in mask[:end]]
        if [*prompt_ids] != self.prompt_ids or ids != self.response_ids[:end]:
            return None
        if any(one not in (0, 1) or one > sampled for one, sampled in zip(kept, self.mask[:end], strict=True)):
            return None
        logprobs = [value if one else 0.0 for value, one in zip(self.logprobs[:end], kept, strict=True)]
        replies = [(first, min(last, end)) for first, last in self.replies if first < end]
        return TranscriptRow([*self.prompt_ids], ids, kept, logprobs, self.versions[:end], replies)

    def cut(self, tokens: int) -> None:
        """Removes the response tokens after the first `tokens`, and their replies."""
        del self.response_ids[tokens:], self.mask[tokens:], self.logprobs[tokens:], self.versions[tokens:]
        self.replies = [(first, last) for first, last in self.replies if last <= tokens]

    def up_to_last_reply(self) -> "TranscriptRow":
        """A copy without what follows the last reply."""
        end = self.replies[-1][1] if self.replies else 0
        parts = (self.response_ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end])
        return TranscriptRow([*self.prompt_ids], *parts, [*self.replies])


@dataclass(frozen=True)
class _Mark:
    """The state of a transcript: lists that are replaced when it is extended, and lengths of those that grow."""

    messages: list[Message]
    shown: list[Message]
    tools: list[Tool]
    prompt_text: str
    num_messages: int
    history: int
    reply_places: int
    rows: int
    response_tokens: int


class Transcript:
    """A conversation whose next prompt is the previous one, the sampled tokens, and the tokens of the new messages.

    States: a reply is awaited (after construction and `extend`), or messages are (after `add_reply`). If the new
    conversation does not continue the recorded one, or the chat template changes earlier turns, a new row begins (a
    fork), whose prompt is encoded from text.

        transcript = Transcript(text_format, [{"role": "user", "content": "Guess."}])
        transcript.add_reply(sampled, {"role": "assistant", "content": "50"})
        transcript.extend([*transcript.messages, {"role": "user", "content": "Lower."}])
        sample_from(transcript.prompt_ids)
    """

    def __init__(
        self,
        text_format: ConversationFormat,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        """`prompt_ids` are the token ids of `messages`, if they are known."""
        self._format = text_format
        self._tools = [*tools]
        self.messages = [*messages]
        """The conversation so far."""
        self.opening = [*messages]
        """The messages of the first prompt."""

        self.history = [*messages]
        """All messages so far; after a fork, with those of the new conversation, unless they only continue it."""

        self.reply_places: list[int] = []
        """The positions of the model's replies in `history`."""

        self.fork_places: list[int] = []
        """The positions in `history` at which forks begin."""

        self._shown = [*messages]
        self._before: _Mark | None = None
        """Where it was before the last question, unless that was the first one."""

        self._prompt_text = text_format.prompt_text(messages, tools)
        self.rows = [self._first_row(messages, tools) if prompt_ids is None else TranscriptRow([*prompt_ids])]
        """The rows so far, in order; the last one is growing."""

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens so far: the prompt of the next reply."""
        return self.rows[-1].prompt_ids + self.rows[-1].response_ids

    @property
    def num_forks(self) -> int:
        """How often a new row has begun."""
        return len(self.rows) - 1

    @property
    def num_response_tokens(self) -> int:
        """All tokens after the first prompt; the prompts of forks are among them."""
        first, *forks = self.rows
        return len(first.response_ids) + sum(len(row.prompt_ids) + len(row.response_ids) for row in forks)

    def as_row(self) -> TranscriptRow:
        """The whole episode up to its last reply, with each fork as a sequence of its own."""
        row = self.rows[0].up_to_last_reply()
        for fork in self.rows[1:]:
            if fork.replies:
                row.joined(fork.up_to_last_reply())
        return row

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, for the message of `add_reply`."""
        return self._format.decoded(ids)

    def special_token(self, ids: Sequence[int]) -> str | None:
        """See `ConversationFormat.special_token`."""
        return self._format.special_token(ids)

    def add_reply(self, sampled: SampledTokens, message: Message) -> None:
        """Adds what the model sampled, and the message in which the caller found its text."""
        assert sampled.ids, "a reply has at least one token"
        self.rows[-1].append_reply(sampled)
        calls = message.get("tool_calls", ())
        assert isinstance(calls, Sequence), f"tool calls {calls!r}"
        self.messages.append(message)
        self.reply_places.append(len(self.history))
        self.history.append(message)
        self._shown.append(placeholder(str(message["content"]), len(calls)))

    def extend(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Continues with a conversation, given as a whole; the model replies to it next.

        Raises `DataError` if the template refuses it, and `EpisodeError` if it is empty; nothing is changed then.
        """
        known = len(self.messages)
        is_same = [*messages[:known]] == self.messages
        shown, text, ids, fork = [*self._shown, *messages[known:]], "", None, None
        if is_same and len(messages) > known and [*tools] == self._tools:
            text = self._format.prompt_text(shown, tools)
            start, end = self.rows[-1].replies[-1]
            reply_ids = self.rows[-1].response_ids[start:end]
            ids = self._format.continuation_ids(self._prompt_text, text, self._shown[-1], reply_ids)
        if ids is None:
            shown, text = [*messages], self._format.prompt_text(messages, tools)
            fork = self._first_row(messages, tools)
        self._before = self._mark()
        self._continue(ids or (), fork)
        self.history += messages[known:] if is_same else messages
        self.messages, self._shown, self._tools, self._prompt_text = [*messages], shown, [*tools], text

    def extend_ids(self, prompt_ids: Sequence[int]) -> None:
        """Continues with a whole prompt of token ids. One that changes the tokens so far begins a new row."""
        known, self._before = self.prompt_ids, self._mark()
        is_same = [*prompt_ids[: len(known)]] == known
        new = prompt_ids[len(known) :] if is_same else prompt_ids
        self._continue(new, None if is_same else TranscriptRow([*prompt_ids]))
        self._show(new)

    def forget_reply(self) -> bool:
        """Returns to the state before the last question, as if it had not been asked; False if it was the first."""
        if (mark := self._before) is None:
            return False
        del self.rows[mark.rows :], self.history[mark.history :], self.reply_places[mark.reply_places :]
        del self.fork_places[mark.rows - 1 :]
        self.rows[-1].cut(mark.response_tokens)
        self.messages, self._shown = mark.messages[: mark.num_messages], mark.shown[: mark.num_messages]
        self._tools, self._prompt_text, self._before = mark.tools, mark.prompt_text, None
        return True

    def select(self, prompt_ids: Sequence[int], response_ids: Sequence[int], response_mask: Sequence[int]) -> None:
        """Keeps one row, with this mask, which may leave out sampled tokens; see `TranscriptRow.selected`.

        Raises `EpisodeError` if no row has these tokens.
        """
        found = [row.selected(prompt_ids, response_ids, response_mask) for row in self.rows]
        row = next((row for row in reversed(found) if row is not None), None)
        if row is None:
            raise EpisodeError(
                "it returned token ids that disagree with those that were sampled.",
                remedy="Return the first prompt_ids and, as response_ids, exactly the sampled ids and the ids that were"
                " appended to the prompt between them; response_mask must be 0 for the latter. Never encode a reply"
                " again from its text.",
            )
        self.rows, self.history, self.reply_places, self.fork_places = [row], [*self.opening], [], []
        shown = 0
        for first, last in row.replies:
            self._show(row.response_ids[shown:first])
            self.reply_places.append(len(self.history))
            self.history.append({"role": "assistant", "content": self.text_of(row.response_ids[first:last])})
            shown = last

    def _show(self, ids: Sequence[int]) -> None:
        """Adds tokens that the model did not sample to the history."""
        if ids:
            self.history.append({"role": "user", "content": self.text_of(ids)})

    def _first_row(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TranscriptRow:
        if ids := self._format.prompt_ids(messages, tools):
            return TranscriptRow(ids)
        raise EpisodeError("it asked the model with an empty text.", remedy="Ask with a text of at least one token.")

    def _continue(self, ids: Sequence[int], fork: TranscriptRow | None) -> None:
        if fork is None:
            self.rows[-1].append(ids)
        else:
            self.rows.append(fork)
            self.fork_places.append(len(self.history))

    def _mark(self) -> _Mark:
        return _Mark(
            self.messages,
            self._shown,
            self._tools,
            self._prompt_text,
            len(self.messages),
            len(self.history),
            len(self.reply_places),
            len(self.rows),
            len(self.rows[-1].response_ids),
        )
