"""Plays the episodes of a batch: in each round, the next replies of all running episodes are sampled as one batch."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.wire import Meta
from hybridflow.config.environment import Credit, EnvironmentSettings
from hybridflow.environments.conversation_format import Continuation, ConversationFormat, tool_call
from hybridflow.environments.interface import Ask, Event, Failed, Finished, Message, Over, Reply, Request, Start
from hybridflow.environments.rows import EpisodeResult, episode_columns
from hybridflow.environments.stages import make_stage
from hybridflow.environments.tool_calls import parser_of
from hybridflow.environments.transcript import Transcript
from hybridflow.errors import EpisodeError

logger = logging.getLogger(__name__)

Generate = Callable[[Batch, int], Batch]
"""Samples responses to prompts (`prompt_ids`, `uid`, `sample_index`) of at most so many tokens."""

_TURN_STRIDE = 1 << 32
"""Turn t of sample i draws with the sample index i + t * 2^32, so no two turns share random numbers, and the first
draws those of a response without an environment."""


@dataclass
class _Episode:
    """An episode in progress; a retry starts with a new object."""

    row: int
    attempt: int = 0
    transcripts: dict[bool, Transcript] = field(default_factory=dict)
    """By whether they are trained on."""

    ask: Ask | None = None
    turns: int = 0
    version: int | None = None
    is_truncated: bool = False

    @property
    def asked(self) -> Transcript:
        """The transcript of the question that it waits for."""
        assert self.ask is not None, "no question is open"
        return self.transcripts[self.ask.is_trained]


class EpisodePlayer:
    """Plays one episode per row of a batch, and returns the columns of `generate`.

    `end_ids` are the tokens that end a reply. Failed episodes count against `environment.error_budget` for the life of
    the player; beyond it, `play` raises `EpisodeError`.

        player = EpisodePlayer(config.environment, tokenizer, end_ids, max_prompt_tokens=64, max_response_tokens=128)
        batch = batch.join(player.play(batch, generate, seed=0))
    """

    def __init__(
        self,
        config: EnvironmentSettings,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: tuple[int, ...],
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
    ) -> None:
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._max_turn_tokens = config.max_turn_tokens or max(1, max_response_tokens // config.max_turns)
        self._formats = {is_chat: ConversationFormat(tokenizer, end_ids, is_chat=is_chat) for is_chat in (False, True)}
        self._calls_in = parser_of(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
        self._stage = make_stage(config)
        self._has_checked = False
        self._num_failures = 0

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._stage.close()

    def play(self, prompts: Batch, generate: Generate, *, seed: int) -> Batch:
        """The episodes of the rows, in order; see `episode_columns`."""
        round_ = _Round(prompts, seed)
        self._check_template(prompts)
        while round_.waiting or round_.episodes:
            while round_.waiting and (self._stage.places is None or len(round_.episodes) < self._stage.places):
                round_.start()
            events = self._stage.advance(round_.take_requests())
            for number in sorted(events):
                self._handle(round_, number, events[number])
            self._sample(round_, generate)
        columns = episode_columns(prompts, round_.results, round_.meta)
        if self._config.credit is Credit.turn:
            return columns.with_columns(tokens={"token_scores": columns.tokens("turn_rewards")})
        return columns

    def _check_template(self, prompts: Batch) -> None:
        """Checks the chat template before the first conversation; a template that forks is an error."""
        if self._has_checked or not any(isinstance(prompt, list) for prompt in prompts.object("prompt")):
            return
        self._has_checked = True
        found = self._formats[True].check()
        if found.continuation is Continuation.fork:
            raise _forks(f"the chat template changes earlier turns: {found.detail}")
        logger.info("environment=%s continuation=%s %s", self._config.name, found.continuation.value, found.detail)
        if found.drops_thoughts:
            logger.warning(
                "environment=%s: the chat template drops <think>...</think> from earlier replies, so an episode in"
                " which the model replies after such a reply is an error; set data.chat_template=FILE to keep them",
                self._config.name,
            )

    def _handle(self, round_: "_Round", number: int, event: Event) -> None:
        episode = round_.episodes[number]
        if isinstance(event, Failed) and event.is_infrastructure and episode.attempt < self._config.retries:
            logger.warning("environment=%s row=%d starts again: %s", self._config.name, episode.row, event.reason)
            round_.retry(number)
        elif isinstance(event, Failed):
            self._fail(round_, number, event.reason)
        elif isinstance(event, Finished):
            round_.finish(number, event)
        else:
            episode.ask = event
            self._listen(round_, number, episode, event)

    def _listen(self, round_: "_Round", number: int, episode: _Episode, ask: Ask) -> None:
        """Extends the transcript by what the episode shows the model, unless it has reached a limit."""
        transcript = episode.transcripts.get(ask.is_trained)
        if episode.turns >= self._config.max_turns:
            round_.requests[number] = Over("max_turns")
        elif transcript is not None:
            transcript.extend(ask.messages, ask.tools)
            if transcript.num_forks:
                raise _forks("the conversation that it shows the model does not continue the previous one")
            if self._allowance(transcript) <= 0:
                episode.is_truncated = True
                round_.requests[number] = Over("max_response_tokens")
        else:
            self._open(round_, episode, ask)
        if number not in round_.requests:
            round_.asking.append(number)

    def _open(self, round_: "_Round", episode: _Episode, ask: Ask) -> None:
        """Begins the transcript; the ids of an unchanged prompt are those of the data."""
        prompt = round_.prompts.object("prompt")[episode.row]
        is_chat = isinstance(prompt, list)
        known: list[Message] = prompt if is_chat else [{"role": "user", "content": prompt}]
        is_same = [*ask.messages] == known and not ask.tools
        ids = round_.prompt_ids[episode.row].tolist() if is_same else None
        transcript = Transcript(self._formats[is_chat], ask.messages, ask.tools, prompt_ids=ids)
        if len(transcript.prompt_ids) > self._max_prompt_tokens:
            raise EpisodeError(
                f"environment={self._config.name}: the first prompt of an episode has {len(transcript.prompt_ids)}"
                f" tokens; data.max_prompt_tokens={self._max_prompt_tokens}.",
                remedy="Raise data.max_prompt_tokens, or show the model less.",
            )
        episode.transcripts[ask.is_trained] = transcript

    def _allowance(self, transcript: Transcript) -> int:
        """Maximum length of the next reply."""
        return min(self._max_turn_tokens, self._max_response_tokens - len(transcript.rows[-1].response_ids))

    def _sample(self, round_: "_Round", generate: Generate) -> None:
        """Samples the replies that episodes wait for; those with the same limit are one batch."""
        by_limit: dict[int, list[int]] = {}
        for number in round_.asking:
            by_limit.setdefault(self._allowance(round_.episodes[number].asked), []).append(number)
        round_.asking.clear()
        for limit, numbers in sorted(by_limit.items(), reverse=True):
            episodes = [round_.episodes[number] for number in numbers]
            rows = torch.tensor([episode.row for episode in episodes])
            turns = torch.tensor([episode.turns for episode in episodes])
            batch = Batch.of(
                rows={
                    "uid": round_.prompts.row("uid")[rows],
                    "sample_index": round_.prompts.row("sample_index")[rows] + turns * _TURN_STRIDE,
                },
                tokens={
                    "prompt_ids": Ragged.from_rows([episode.asked.prompt_ids for episode in episodes], torch.int64)
                },
            )
            sampled = generate(batch, limit)
            round_.meta = sampled.meta
            ids, logprobs = sampled.tokens("response_ids").rows(), sampled.tokens("rollout_logprobs").rows()
            for index, number in enumerate(numbers):
                episodes[index].version = _oldest(episodes[index].version, int(sampled.row("weight_version")[index]))
                is_truncated = bool(sampled.row("truncated")[index])
                round_.requests[number] = self._reply(
                    episodes[index], ids[index].tolist(), logprobs[index].tolist(), is_truncated=is_truncated
                )

    def _reply(self, episode: _Episode, ids: list[int], logprobs: list[float], *, is_truncated: bool) -> Reply:
        """Adds what was sampled to the transcript. A tool call that a limit cut off does not count."""
        transcript, ask = episode.asked, episode.ask
        assert ask is not None, "a reply without a question"
        text = transcript.text_of(ids)
        calls = self._calls_in(text) if ask.tools and not is_truncated else []
        message: Message = {"role": "assistant", "content": text}
        if calls and all("error" not in call for call in calls):
            message["tool_calls"] = [tool_call(call["name"], call["arguments"], i) for i, call in enumerate(calls)]
        transcript.add_reply(ids, logprobs, message)
        episode.ask = None
        episode.turns += 1
        if ask.is_trained:
            episode.is_truncated = is_truncated
        return Reply(text, message, calls, is_truncated)

    def _fail(self, round_: "_Round", number: int, reason: str) -> None:
        self._num_failures += 1
        budget = self._config.error_budget
        logger.warning("environment failures=%d environment.error_budget=%d: %s", self._num_failures, budget, reason)
        if self._num_failures > budget:
            raise EpisodeError(
                f"environment={self._config.name} failed: {reason} This rank has lost {self._num_failures} episodes so"
                f" far; environment.error_budget={budget} allows {budget} per rank.",
                remedy="Fix the environment, or raise environment.error_budget.",
            )
        round_.finish(number, None)


class _Round:
    """The state of `play`: rows that wait, running episodes by number, and results by row."""

    def __init__(self, prompts: Batch, seed: int) -> None:
        self.prompts = prompts
        self.prompt_ids = prompts.tokens("prompt_ids").rows()
        self.waiting = deque(_Episode(row) for row in range(len(prompts)))
        self.episodes: dict[int, _Episode] = {}
        self.requests: dict[int, Request] = {}
        self.asking: list[int] = []
        self.results: dict[int, EpisodeResult] = {}
        self.meta: Meta = {}
        self._seed = seed
        self._next = 0

    def start(self) -> None:
        """Starts the next row that waits."""
        episode = self.waiting.popleft()
        self.episodes[self._next] = episode
        row = {name: values[episode.row] for name, values in self.prompts.objects.items()}
        self.requests[self._next] = Start(row, environment_seed(self._seed, int(self.prompts.row("uid")[episode.row])))
        self._next += 1

    def take_requests(self) -> dict[int, Request]:
        """The requests that are due, once."""
        taken, self.requests = self.requests, {}
        return taken

    def retry(self, number: int) -> None:
        """Puts the row of a failed episode back, to start first."""
        lost = self.episodes.pop(number)
        self.waiting.appendleft(_Episode(lost.row, lost.attempt + 1))

    def finish(self, number: int, ended: Finished | None) -> None:
        """Records the result of an episode; None for one that failed."""
        episode = self.episodes.pop(number)
        transcript = episode.transcripts.get(True)
        self.results[episode.row] = EpisodeResult(
            transcript, ended, episode.version, episode.turns, episode.is_truncated
        )


def environment_seed(seed: int, uid: int) -> int:
    """The seed of an episode, which all samples of a prompt share."""
    return (seed * 1_000_003 + uid) & 0x7FFFFFFF


def _oldest(known: int | None, version: int) -> int:
    return version if known is None else min(known, version)


def _forks(why: str) -> EpisodeError:
    return EpisodeError(
        f"An episode would need several rows of training data, because {why}.",
        remedy="Set data.chat_template=FILE to a template that only appends to earlier turns, and continue each"
        " conversation with the messages that were replied to, the reply's message, and new messages.",
    )
