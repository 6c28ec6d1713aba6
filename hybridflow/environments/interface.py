"""The interface of environments, and the messages between an episode and the rollout."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hybridflow.environments.messages import message_flaw
from hybridflow.errors import EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, object]
"""A role and its content, as in `{"role": "user", "content": "Hello"}`; a reply may also have `tool_calls`."""

Tool = dict[str, object]
"""The JSON schema of a tool, as chat templates expect it."""

Observation = str | list[Message] | None
"""Text or messages for the model; text becomes a message of the user if the prompt is a conversation."""


class Environment(Protocol):
    """A game or task that the model acts in, one object per episode. Any of the methods may be a coroutine function.

    An attribute `tools`, a list of typed functions with docstrings, offers tools: the model's calls are answered by
    them, and only replies without a call become a step. `close` is optional, and so is `over`, which returns the reward
    of an episode that ends at a limit of turns or tokens.

        class Guess:
            def reset(self, row, *, seed):
                self.number = random.Random(seed).randint(1, 100)

            def step(self, action):
                ...
                return "lower", 0.0, False, {}
    """

    def reset(self, row: Mapping[str, object], *, seed: int) -> Observation:
        """Starts the episode of a row of the data. Returns the first prompt; None keeps the prompt of the row.

        Samples of one prompt get the same seed.
        """
        ...

    def step(self, action: str) -> tuple[Observation, float, bool, dict]:
        """The answer to a reply: observation, reward, whether the episode is done, and further information."""
        ...

    def close(self) -> None:
        """Ends the episode."""
        ...


@dataclass(frozen=True)
class Reply:
    """A reply of the model: its text, the tool calls found in it, and the message for the conversation."""

    text: str
    message: Message
    calls: list[dict] = field(default_factory=list)
    """Tool calls, each with `name` and `arguments`, or with an `error` for the model."""

    is_truncated: bool = False
    """Whether a token limit cut it off."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens that the model sampled, if it was asked with token ids; else empty."""

    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of `token_ids`."""


@dataclass(frozen=True)
class Start:
    """Starts the episode of a row of the data."""

    row: Mapping[str, object]
    seed: int


@dataclass(frozen=True)
class Ask:
    """An episode that waits for a reply to a whole conversation, or to a prompt of token ids."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    is_trained: bool = True
    prompt_ids: list[int] | None = None
    """The whole prompt, in place of `messages`."""

    forgets_reply: bool = False
    """Whether nobody received the last reply, because the episode no longer waited for it."""


@dataclass(frozen=True)
class Over:
    """Tells an episode that it gets no further reply, because it has reached a limit."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Tells an episode that the model cannot be shown what it was asked."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Finished:
    """An episode that has ended: the reward after each reply, and further information."""

    rewards: list[float]
    info: dict = field(default_factory=dict)
    tokens: dict[str, list[int]] | None = None
    """`prompt_ids`, `response_ids` and `response_mask` of the sequence to train on, if the episode chooses it."""

    forgets_reply: bool = False
    """As in `Ask`."""

    stderr: str = ""
    """The end of what the program of the episode wrote to its standard error."""


@dataclass(frozen=True)
class Failed:
    """An episode without a result. After an infrastructure failure it may succeed if it starts again."""

    reason: str
    is_infrastructure: bool = False


Answer = Reply | Over | Refused
Request = Start | Answer
Event = Ask | Finished | Failed


@dataclass(frozen=True)
class ModelInfo:
    """The model and the limits of the run, for episodes that work with token ids."""

    tokenizer: "PreTrainedTokenizerBase"
    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    model_type: str | None = None
    """`model_type` in the model's config.json."""


class EpisodeOver(Exception):
    """The episode has reached its limit of turns or tokens; raised by `Model.reply`."""


class Model:
    """The model in an episode: a coroutine asks it for replies.

    async def episode(model, row):
        messages = [*row["prompt"]]
        reply = await model.reply(messages)
        return float(reply.text == row["answer"])
    """

    def __init__(self, exchange: Callable[[Ask], Awaitable[Answer]], info: ModelInfo | None = None) -> None:
        self._exchange = exchange
        self.info = info
        self.num_replies = 0

    async def reply(
        self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = (), trained: bool = True
    ) -> Reply:
        """The model's reply to a whole conversation; add its `message` and your answer before the next one.

        A conversation that does not continue the previous one begins a new sequence (a fork). Replies with
        `trained=False` are not trained on, such as those of an opponent. Raises `EpisodeOver` at a limit, and
        `EpisodeError` for anything but messages, and for messages that the chat template refuses.
        """
        return await self._answer(Ask(_conversation(messages), [*tools], trained))

    async def sample(self, prompt_ids: Sequence[int]) -> Reply:
        """The model's reply to a whole prompt of token ids, for episodes that use nothing else.

        A prompt that does not begin with the previous one and its sampled tokens begins a new sequence (a fork). Raises
        `EpisodeOver` at a limit, and `EpisodeError` for ids that are not in the vocabulary.
        """
        assert self.info is not None, "the environment does not work with token ids"
        ids, size = [int(token) for token in prompt_ids], len(self.info.tokenizer)
        outside = [token for token in ids if not 0 <= token < size]
        if outside or not ids:
            raise EpisodeError(
                f"it asked the model with {f'the token id {outside[0]}' if outside else 'no token ids'}; the tokenizer"
                f" has ids from 0 to {size - 1}.",
                remedy="Ask with what the tokenizer returns.",
            )
        return await self._answer(Ask([], prompt_ids=ids))

    async def _answer(self, ask: Ask) -> Reply:
        answer = await self._exchange(ask)
        if isinstance(answer, Over):
            raise EpisodeOver(answer.reason)
        if isinstance(answer, Refused):
            raise EpisodeError(answer.reason, remedy=answer.remedy)
        self.num_replies += ask.is_trained
        return answer


async def awaited(answer: object) -> object:
    """The result of a function of a user, which may be a coroutine function."""
    return await answer if isinstance(answer, Awaitable) else answer


def _conversation(messages: object) -> list[Message]:
    """The messages of a question; raises `EpisodeError` for anything else."""
    alone: Message = {"role": "user", "content": messages}
    given = [alone] if isinstance(messages, str) else messages
    if not isinstance(given, list | tuple) or not given:
        flaw = "no messages" if given in ([], ()) else f"an object of type {type(given).__name__}, not messages"
        raise EpisodeError(
            f"it asked the model with {flaw}.", remedy='Ask with [{"role": "user", "content": "..."}, ...].'
        )
    found: list[Message] = []
    for place, message in enumerate(given):
        if flaw := message_flaw(message):
            raise EpisodeError(
                f"it asked the model with messages of which messages[{place}] {flaw}.",
                remedy='Write each message as {"role": "user", "content": "..."}.',
            )
        found.append(message if message.get("content") is not None else {**message, "content": ""})
    return found
