"""Plays the episodes of a batch: replies go to environments, and answers to the engine, while other episodes run."""

import logging
from itertools import count
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.row_names import row_names
from hybridflow.batch.wire import Meta
from hybridflow.config.environment import Credit, EnvironmentSettings
from hybridflow.data.tokenization import may_be_cut
from hybridflow.environments.conversation_format import Continuation, ConversationFormat, tool_call
from hybridflow.environments.interface import (
    Ask,
    Event,
    Failed,
    Finished,
    Message,
    ModelInfo,
    Over,
    Refused,
    Reply,
)
from hybridflow.environments.rows import episode_columns
from hybridflow.environments.running import LIMITED, Episode, RunningEpisodes
from hybridflow.environments.stages import make_stage
from hybridflow.environments.tool_calls import parser_of
from hybridflow.environments.transcript import Transcript
from hybridflow.errors import DataError, EpisodeError

logger = logging.getLogger(__name__)

_REMEDIES = {
    "max_turns": "raise environment.max_turns, or let the environment end its episodes earlier",
    "max_response_tokens": "raise data.max_response_tokens, which counts all replies and observations of an episode, or"
    " lower environment.max_turn_tokens",
}
"""Remedies if most episodes reach a limit."""

_SHOWN_CHARACTERS = 300

_CUT_CALL = (
    "a tool call was cut off by environment.max_turn_tokens=%d or data.max_response_tokens=%d, so no tool was called;"
    " raise them if this happens often (environment/cut_tool_calls)"
)
_SPECIAL_TOKEN = (
    "the model sampled the special token '%s' within a reply; it stays in the prompt as it is. Remove it from"
    " observations that repeat a reply, where it would be encoded as the same token"
)


class ReplySampler(Protocol):
    """A rollout engine with settings for sampling, which nothing else uses meanwhile."""

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        """Begins to sample replies of at most `max_tokens` tokens to prompts (`prompt_ids`, `uid`, `sample_index`)."""
        ...

    def poll(self) -> Batch:
        """Samples one token per row, and returns the rows that have finished, as `RolloutEngine.poll` does."""
        ...

    def withdraw(self) -> None:
        """Abandons all rows."""
        ...


class EpisodePlayer:
    """Plays one episode per row of a batch, and returns the columns of `generate`.

    `end_ids` are the tokens that end a reply. Failed episodes count against `environment.error_budget` for the life of
    the player; beyond it, `play` raises `EpisodeError`.

        player = EpisodePlayer(config.environment, tokenizer, end_ids, max_prompt_tokens=64, max_response_tokens=128)
        batch = batch.join(player.play(batch, sampler, seed=0))
    """

    def __init__(
        self,
        config: EnvironmentSettings,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: tuple[int, ...],
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        gamma: float = 1.0,
    ) -> None:
        self._config = config
        self._discount = gamma if config.discounts_replies else 1.0
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._max_turn_tokens = config.max_turn_tokens or max(1, max_response_tokens // config.max_turns)
        self._max_tokens = max(max_prompt_tokens, max_response_tokens)
        self._formats = {
            is_chat: ConversationFormat(tokenizer, end_ids, is_chat=is_chat, max_tokens=self._max_tokens)
            for is_chat in (False, True)
        }
        self._calls_in = parser_of(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
        self._stage = make_stage(config, ModelInfo(tokenizer, max_prompt_tokens, max_response_tokens, config.max_turns))
        self._has_checked = False
        self._noted: set[str] = set()
        """Metrics and limits of which the log has warned."""

        self._num_failures = 0
        self._numbers = count()

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._stage.close()

    def play(self, prompts: Batch, sampler: ReplySampler, *, seed: int, is_evaluation: bool = False) -> Batch:
        """The episodes of the rows, in order; see `episode_columns`. Returns of an evaluation are not discounted."""
        self._check_template(prompts)
        running = RunningEpisodes(prompts, seed, self._numbers)
        try:
            while running.are_left:
                self._advance(running, sampler)
        except BaseException:
            self._stage.abandon()
            sampler.withdraw()
            raise
        finally:
            for each in self._formats.values():
                each.clear_cache()
        self._note_limits(running)
        counts: Meta = dict.fromkeys((f"{LIMITED}{limit}" for limit in _REMEDIES), 0.0)
        counts |= {name: float(count) for name, count in running.counts.items() if count}
        discount = None if is_evaluation or self._config.credit is Credit.outcome else self._discount
        return episode_columns(prompts, running.results, running.meta | counts, discount=discount)

    def _advance(self, running: RunningEpisodes, sampler: ReplySampler) -> None:
        """Sends what is due, and samples one token of all rows. Environments are waited for if there are none."""
        while running.waiting and (self._stage.places is None or len(running.episodes) < self._stage.places):
            running.start()
        self._stage.send(running.take_requests())
        must_wait = not running.sampling and (not running.asking or self._must_gather(running))
        events = self._stage.receive(wait=must_wait)
        for number in sorted(events):
            self._handle(running, number, events[number])
        if running.asking and not self._must_gather(running):
            self._submit(running, sampler)
        if running.sampling:
            self._take(running, sampler.poll())

    def _must_gather(self, running: RunningEpisodes) -> bool:
        """Whether further questions must come before the first are sampled.

        Episodes of one turn that start together are sampled as one batch, as responses without an environment are: the
        same tokens as one by one, and bitwise equal log-probabilities.
        """
        is_first = not running.sampling and not running.results
        return self._config.max_turns == 1 and is_first and len(running.asking) < len(running.episodes)

    def _check_template(self, prompts: Batch) -> None:
        """Says before the first conversation how the chat template continues it."""
        if self._has_checked or not any(isinstance(prompt, list) for prompt in prompts.object("prompt")):
            return
        self._has_checked = True
        found, key = self._formats[True].check(), self._config.chosen
        logger.info("%s continuation=%s %s", key, found.continuation.value, found.detail)
        when = (
            "drops <think>...</think> from earlier replies, so what follows such a reply"
            if found.drops_thoughts
            else ""
        )
        if found.continuation is Continuation.fork:
            when = "changes earlier turns, so each turn"
        if when:
            logger.warning(
                "%s: the chat template %s is a sequence of its own, with the whole conversation as its prompt. This"
                " costs time, and counts towards data.max_response_tokens; data.chat_template=FILE sets another one",
                key,
                when,
            )

    def _handle(self, running: RunningEpisodes, number: int, event: Event) -> None:
        episode = running.episodes[number]
        if not isinstance(event, Failed) and event.forgets_reply:
            episode.forget_reply()
        if isinstance(event, Ask):
            episode.ask = event
            self._listen(running, number, episode, event)
        elif isinstance(event, Failed) and event.is_infrastructure and episode.attempt < self._config.retries:
            logger.warning("%s row=%d starts again: %s", self._config.chosen, episode.row, event.reason)
            running.retry(number)
        elif isinstance(event, Failed):
            self._count_failure(episode, event.reason)
            running.finish(number, None)
        else:
            self._note_stderr(event.stderr)
            running.finish(number, self._ended(episode, event))

    def _ended(self, episode: Episode, ended: Finished) -> Finished | None:
        """The result of an episode; None if it chose tokens to train on that it cannot have."""
        if ended.tokens is None:
            return ended
        try:
            episode.transcripts[True].select(**ended.tokens)
            self._check_prompt(episode.transcripts[True])
        except EpisodeError as error:
            self._count_failure(episode, f"{error.message} {error.remedy}")
            return None
        return ended

    def _listen(self, running: RunningEpisodes, number: int, episode: Episode, ask: Ask) -> None:
        """Shows the model what the episode asks it, unless the episode has reached a limit or cannot ask this."""
        if episode.turns >= self._config.max_turns:
            episode.limit = episode.limit or "max_turns"
        try:
            if episode.limit is None:
                self._show(running, episode, ask)
        except (DataError, EpisodeError) as error:
            running.requests[number] = Refused(error.message, error.remedy)
            return
        if episode.limit is None:
            running.asking.append(number)
        else:
            running.requests[number] = Over(episode.limit)

    def _show(self, running: RunningEpisodes, episode: Episode, ask: Ask) -> None:
        """Extends the transcript by what the episode asks; notes if it then leaves no room for a reply."""
        transcript = episode.transcripts.get(ask.is_trained)
        if transcript is None:
            self._open(running, episode, ask)
            return
        if ask.prompt_ids is None:
            transcript.extend(ask.messages, ask.tools)
        else:
            transcript.extend_ids(ask.prompt_ids)
        if self._allowance(transcript) <= 0:
            episode.is_truncated, episode.limit = True, "max_response_tokens"

    def _open(self, running: RunningEpisodes, episode: Episode, ask: Ask) -> None:
        """Begins the transcript; the ids of an unchanged prompt are those of the data."""
        prompt = running.prompts.object("prompt")[episode.row]
        is_chat = isinstance(prompt, list)
        known: list[Message] = prompt if is_chat else [{"role": "user", "content": prompt}]
        shown = known if ask.prompt_ids is not None else ask.messages
        is_same = ask.prompt_ids is None and [*shown] == known and not ask.tools
        ids = running.prompt_ids[episode.row].tolist() if is_same else ask.prompt_ids
        transcript = Transcript(self._formats[is_chat], shown, ask.tools, prompt_ids=ids)
        self._check_prompt(transcript)
        episode.transcripts[ask.is_trained] = transcript

    def _check_prompt(self, transcript: Transcript) -> None:
        num_tokens, limit = len(transcript.rows[0].prompt_ids), self._max_prompt_tokens
        if num_tokens > limit:
            at_least = "at least " if may_be_cut(transcript.opening, self._max_tokens) else ""
            raise EpisodeError(
                f"its first prompt has {at_least}{num_tokens} tokens; data.max_prompt_tokens={limit}.",
                remedy="Raise data.max_prompt_tokens, or show the model less.",
            )

    def _allowance(self, transcript: Transcript) -> int:
        """Maximum length of the next reply."""
        return min(self._max_turn_tokens, self._max_response_tokens - transcript.num_response_tokens)

    def _submit(self, running: RunningEpisodes, sampler: ReplySampler) -> None:
        """Begins to sample the replies that episodes wait for; those with the same limit are submitted together."""
        by_limit: dict[int, list[int]] = {}
        for number in running.asking:
            by_limit.setdefault(self._allowance(running.episodes[number].asked), []).append(number)
        running.asking.clear()
        for limit, numbers in sorted(by_limit.items(), reverse=True):
            names = [running.name(number) for number in numbers]
            prompts = [running.episodes[number].asked.prompt_ids for number in numbers]
            uids, samples = torch.tensor(names, dtype=torch.int64).T
            rows = Batch.of(
                rows={"uid": uids, "sample_index": samples},
                tokens={"prompt_ids": Ragged.from_rows(prompts, torch.int64)},
            )
            sampler.submit(rows, max_tokens=limit)
            running.sampling |= dict(zip(names, numbers, strict=True))

    def _take(self, running: RunningEpisodes, sampled: Batch) -> None:
        """Replies that have been sampled go to their environments."""
        running.meta = sampled.meta
        replies = zip(
            row_names(sampled),
            [ids.tolist() for ids in sampled.tokens("response_ids").rows()],
            [logprobs.tolist() for logprobs in sampled.tokens("rollout_logprobs").rows()],
            sampled.row("truncated").tolist(),
            sampled.row("weight_version").tolist(),
            strict=True,
        )
        for name, ids, logprobs, is_truncated, version in replies:
            number = running.sampling.pop(name)
            episode = running.episodes[number]
            episode.sampled_by(version)
            running.requests[number] = self._reply(running, episode, ids, logprobs, is_truncated=is_truncated)

    def _reply(
        self, running: RunningEpisodes, episode: Episode, ids: list[int], logprobs: list[float], *, is_truncated: bool
    ) -> Reply:
        """Adds what was sampled to the transcript. A tool call that a limit cut off does not count."""
        transcript, ask = episode.asked, episode.ask
        assert ask is not None, "a reply without a question"
        text, num_prompt_tokens = transcript.text_of(ids), len(transcript.prompt_ids)
        found = self._calls_in(text) if ask.tools else []
        calls = [] if is_truncated else found
        message: Message = {"role": "assistant", "content": text}
        if calls and all("error" not in call for call in calls):
            message["tool_calls"] = [tool_call(call["name"], call["arguments"], i) for i, call in enumerate(calls)]
        if found and is_truncated:
            limits = self._max_turn_tokens, self._max_response_tokens
            self._note(running, "environment/cut_tool_calls", _CUT_CALL, *limits)
        if not calls and (special := transcript.special_token(ids)):
            self._note(running, "environment/special_token_replies", _SPECIAL_TOKEN, special)
        transcript.add_reply(ids, logprobs, message)
        episode.ask, episode.has_trained_reply = None, ask.is_trained
        episode.turns += 1
        if ask.is_trained:
            episode.is_truncated = is_truncated
        tokens = ([], []) if ask.prompt_ids is None else (ids, logprobs)
        return Reply(text, message, calls, is_truncated, num_prompt_tokens, len(ids), *tokens)

    def _note(self, running: RunningEpisodes, metric: str, words: str, *values: object) -> None:
        """Counts a reply under a metric; the first one of the player's life is also logged."""
        running.counts[metric] += 1
        if metric not in self._noted:
            self._noted.add(metric)
            logger.warning(f"%s: {words}", self._config.chosen, *values)

    def _note_limits(self, running: RunningEpisodes) -> None:
        """Warns once of each limit at which most episodes of a batch have ended."""
        settings = {
            "max_turns": f"environment.max_turns={self._config.max_turns}",
            "max_response_tokens": f"data.max_response_tokens={self._max_response_tokens}",
        }
        for limit, setting in settings.items():
            found, count = running.counts[f"{LIMITED}{limit}"], len(running.results)
            if 2 * found > count and limit not in self._noted:
                self._noted.add(limit)
                logger.warning(
                    "%s: %d of %d episodes ended at %s before they were done; %s",
                    self._config.chosen,
                    found,
                    count,
                    setting,
                    _REMEDIES[limit],
                )

    def _note_stderr(self, stderr: str) -> None:
        """Logs the first of what programs of finished episodes wrote to their standard error."""
        if stderr and "stderr" not in self._noted:
            self._noted.add("stderr")
            words = "%s: the program of an episode wrote to its standard error (stderr in samples.jsonl): %s"
            logger.info(words, self._config.chosen, stderr[-_SHOWN_CHARACTERS:])

    def _count_failure(self, episode: Episode, reason: str) -> None:
        """Raises `EpisodeError` if more episodes have failed than `environment.error_budget` allows."""
        self._num_failures += 1
        failures, budget = self._num_failures, self._config.error_budget
        where = f"row {episode.row} of the batch, replies so far: {episode.turns}"
        if failures > budget:
            raise EpisodeError(
                f"{self._config.chosen} failed ({where}): {reason} Failed episodes of this rank so far: {failures};"
                f" environment.error_budget={budget} allows {budget}.",
                remedy="Fix the environment, or raise environment.error_budget.",
            )
        words = "environment failures=%d environment.error_budget=%d (%s): %s"
        logger.warning(words, failures, budget, where, reason)
