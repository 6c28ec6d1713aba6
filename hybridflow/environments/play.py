"""Plays episodes: replies go to environments, and their answers to the rollout engine, while other episodes run."""

from collections import Counter, deque
from collections.abc import Container, Sequence
from itertools import count
from math import inf
from typing import Protocol

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.episode_counts import COUNTED, CUT_CALLS, DEADLINE, LIMITED, SPECIAL_TOKENS
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.batch.versions import token_versions
from hybridflow.batch.wire import Meta
from hybridflow.config.environment import Credit, EnvironmentSettings
from hybridflow.data.tokenization import may_be_cut
from hybridflow.environments.conversation_format import ConversationFormat, tool_call
from hybridflow.environments.episode_log import LIMITS, EpisodeLog
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
from hybridflow.environments.rows import EpisodeResult, episode_columns
from hybridflow.environments.running import Episode, RunningEpisodes
from hybridflow.environments.shared_stage import shared_stage
from hybridflow.environments.stages import make_stage
from hybridflow.environments.tool_calls import parser_of
from hybridflow.environments.transcript import SampledTokens, Transcript
from hybridflow.errors import DataError, EpisodeError
from hybridflow.parallel.groups import Ranks


class ReplySampler(Protocol):
    """A rollout engine with settings for sampling, which nothing else uses meanwhile."""

    def submit(self, rows: Batch, *, max_tokens: int) -> None:
        """Begins to sample replies of at most `max_tokens` tokens to prompts (`prompt_ids`, `uid`, `sample_index`).

        `may_continue` says of each whether its prompt and reply may be the beginning of a later prompt.
        """
        ...

    def poll(self) -> Batch:
        """Samples one token per row, and returns the rows that have finished, as `RolloutEngine.poll` does."""
        ...

    def withdraw(self, rows: Batch | None = None) -> Batch:
        """Ends some rows, or all; returns them with the tokens that they have."""
        ...


class EpisodePlayer:
    """Plays one episode per row, and returns the columns of `generate`: those of a whole batch (`play`), or of episodes
    that an `EpisodeStream` advances.

    `end_ids` are the tokens that end a reply. Failed episodes count against `environment.error_budget` for the life of
    the player; beyond it, `play` raises `EpisodeError`.

        info = ModelInfo(tokenizer, max_prompt_tokens=64, max_response_tokens=128, max_turns=8)
        player = EpisodePlayer(config.environment, info, end_ids)
        batch = batch.join(player.play(batch, sampler, seed=0))
    """

    def __init__(
        self,
        config: EnvironmentSettings,
        info: ModelInfo,
        end_ids: tuple[int, ...],
        *,
        gamma: float = 1.0,
        log: EpisodeLog | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`log`: another player's, so that nothing is said twice, and failures count together. `ranks`: those of the
        engine; the ranks of a replica make the same calls, and its first rank runs the episodes."""
        self._config = config
        self._discount = gamma if config.discounts_replies else 1.0
        self._max_prompt_tokens = info.max_prompt_tokens
        self._max_response_tokens = info.max_response_tokens
        self._max_turn_tokens = config.max_turn_tokens or max(1, info.max_response_tokens // config.max_turns)
        self._max_tokens = max(info.max_prompt_tokens, info.max_response_tokens)
        self._formats = {
            is_chat: ConversationFormat(info.tokenizer, end_ids, is_chat=is_chat, max_tokens=self._max_tokens)
            for is_chat in (False, True)
        }
        template = info.tokenizer.chat_template
        self._calls_in = parser_of(template if isinstance(template, str) else None)
        self._stage = shared_stage(make_stage(config, info), ranks or Ranks.alone())
        self._log = log or EpisodeLog(config, info.max_response_tokens)
        self._numbers = count()

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._stage.close()

    def play(self, prompts: Batch, sampler: ReplySampler, *, seed: int, is_evaluation: bool = False) -> Batch:
        """The episodes of the rows, in order; see `episode_columns`. Returns of an evaluation are not discounted."""
        running = RunningEpisodes(seed, self._numbers, is_whole_batch=True)
        places = self.add(running, prompts)
        try:
            while running.are_left:
                self.advance(running, sampler)
        except BaseException:
            self.abandon(sampler)
            raise
        finally:
            self.clear_caches()
        results = [running.results[place] for place in places]
        return self.columns(running, prompts, results, is_evaluation=is_evaluation)

    def begin(self, seed: int) -> RunningEpisodes:
        """Episodes with this seed, of which there are none yet."""
        return RunningEpisodes(seed, self._numbers)

    def add(self, running: RunningEpisodes, prompts: Batch) -> range:
        """Adds episodes; see `RunningEpisodes.add`. The first conversation's template is described in the log."""
        self._check_template(prompts)
        return running.add(prompts)

    def abandon(self, sampler: ReplySampler) -> None:
        """Ends all episodes without a result."""
        try:
            self._stage.abandon()
        finally:
            sampler.withdraw()

    def end_early(self, running: RunningEpisodes, sampler: ReplySampler, names: Container[RowName]) -> None:
        """Gives episodes no further reply; one that is being sampled ends with the tokens that it has."""
        for episode in running.waiting:
            if episode.name in names:
                running.finish_early(episode)
        running.waiting = deque(episode for episode in running.waiting if episode.name not in names)
        chosen = {number for number, episode in running.episodes.items() if episode.name in names}
        for number in chosen:
            running.episodes[number].is_withdrawn = True
        asked = [number for number in running.asking if number in chosen]
        running.asking = [number for number in running.asking if number not in chosen]
        sampled = [name for name, number in running.sampling.items() if number in chosen]
        if sampled:
            uids, samples = torch.tensor(sampled, dtype=torch.int64).T
            found = sampler.withdraw(Batch.of(rows={"uid": uids.clone(), "sample_index": samples.clone()}))
            has_tokens = found.tokens("response_ids").lengths > 0
            asked += [running.sampling.pop(name) for name in row_names(found.select(~has_tokens))]
            self.take(running, found.select(has_tokens))
        for number in asked:
            self._end(running, number, DEADLINE)

    def excuse(self, seconds: float) -> None:
        """Gives environments more time: the player has not listened to them for so long."""
        self._stage.excuse(seconds)

    def clear_caches(self) -> None:
        """Forgets encoded conversations."""
        for each in self._formats.values():
            each.clear_cache()

    def columns(
        self,
        running: RunningEpisodes,
        prompts: Batch,
        results: Sequence[EpisodeResult],
        *,
        is_evaluation: bool = False,
    ) -> Batch:
        """See `episode_columns`; the metadata counts what happened since the last call."""
        found = running.drain_counts()
        limited = Counter(result.limit for result in results if result.ended is not None)
        self._log.limits(limited, len(results))
        found[f"{COUNTED}failures"] += sum(result.ended is None for result in results)
        limits = LIMITS if running.is_whole_batch else [*LIMITS, DEADLINE]
        counts: Meta = {f"{LIMITED}{limit}": float(limited[limit]) for limit in limits}
        counts |= {name: float(count) for name, count in found.items() if count}
        discount = None if is_evaluation or self._config.credit is Credit.outcome else self._discount
        return episode_columns(prompts, results, running.meta | counts, discount=discount, version=running.version)

    def advance(self, running: RunningEpisodes, sampler: ReplySampler) -> None:
        """Lets environments act, and samples one token per reply; waits for an environment if there is no reply."""
        self.deliver(running, seconds=inf)
        self.sample(running, sampler)

    def deliver(self, running: RunningEpisodes, *, seconds: float = 0.0) -> None:
        """Starts episodes, and exchanges requests and events with environments until nothing is due.

        Waits up to `seconds` for an event if there is nothing to sample.
        """
        is_due = True
        while is_due:
            while self._may_start(running):
                running.start()
            self._stage.send(running.take_requests())
            must_wait = running.are_acting and (not running.can_sample or self._must_gather(running))
            events = self._stage.receive(seconds=seconds if must_wait else 0.0)
            for number in sorted(events):
                self._handle(running, number, events[number])
            is_due = bool(running.requests) or self._may_start(running)

    def _may_start(self, running: RunningEpisodes) -> bool:
        """Whether an episode waits, and there is a place for it."""
        return bool(running.waiting) and (self._stage.places is None or len(running.episodes) < self._stage.places)

    def sample(self, running: RunningEpisodes, sampler: ReplySampler) -> None:
        """Samples one token per reply, also of the questions that wait."""
        if running.asking and not self._must_gather(running):
            self._submit(running, sampler)
        if running.sampling:
            self.take(running, sampler.poll())

    def _must_gather(self, running: RunningEpisodes) -> bool:
        """Whether further questions must come before the first are sampled.

        Episodes of one turn that start together are sampled as one batch, as responses without an environment are: the
        same tokens as one by one, and bitwise equal log-probabilities.
        """
        is_first = running.is_whole_batch and not running.sampling and not running.results
        return self._config.max_turns == 1 and is_first and len(running.asking) < len(running.episodes)

    def _check_template(self, prompts: Batch) -> None:
        """Says before the first conversation how the chat template continues it."""
        if not self._log.has_template and any(isinstance(prompt, list) for prompt in prompts.object("prompt")):
            self._log.template(self._formats[True].check())

    def _handle(self, running: RunningEpisodes, number: int, event: Event) -> None:
        episode = running.episodes[number]
        if not isinstance(event, Failed) and event.forgets_reply:
            episode.forget_reply()
        if isinstance(event, Ask):
            episode.ask = event
            self._listen(running, number, episode, event)
        elif isinstance(event, Failed) and event.is_infrastructure and episode.may_start_again(self._config.retries):
            self._log.retry(episode.name, event.reason)
            running.retry(number)
        elif isinstance(event, Failed):
            self._log.failure(episode.name, episode.turns, event.reason)
            running.finish(number, None)
        else:
            self._log.stderr(event.stderr)
            running.finish(number, self._ended(episode, event))

    def _ended(self, episode: Episode, ended: Finished) -> Finished | None:
        """The result of an episode; None if it chose tokens to train on that it cannot have."""
        if ended.tokens is None:
            return ended
        try:
            episode.transcripts[True].select(**ended.tokens)
            self._check_prompt(episode.transcripts[True])
        except EpisodeError as error:
            self._log.failure(episode.name, episode.turns, f"{error.message} {error.remedy}")
            return None
        return ended

    def _listen(self, running: RunningEpisodes, number: int, episode: Episode, ask: Ask) -> None:
        """Shows the model what the episode asks it, unless the episode has reached a limit or cannot ask this."""
        if episode.turns >= self._config.max_turns:
            episode.limit = episode.limit or "max_turns"
        try:
            if episode.limit is None and not episode.is_withdrawn:
                self._show(episode, ask)
        except (DataError, EpisodeError) as error:
            running.requests[number] = Refused(error.message, error.remedy)
            return
        if episode.limit is not None or episode.is_withdrawn:
            self._end(running, number, episode.limit or DEADLINE)
        else:
            running.asking.append(number)

    def _end(self, running: RunningEpisodes, number: int, limit: str) -> None:
        """An episode that waits for a reply gets none, because of a limit."""
        episode = running.episodes[number]
        episode.limit = limit
        episode.is_truncated |= limit == DEADLINE
        running.requests[number] = Over(limit)

    def _show(self, episode: Episode, ask: Ask) -> None:
        """Extends the transcript by what the episode asks; notes if it then leaves no room for a reply."""
        transcript = episode.transcripts.get(ask.is_trained)
        if transcript is None:
            self._open(episode, ask)
            return
        if ask.prompt_ids is None:
            transcript.extend(ask.messages, ask.tools)
        else:
            transcript.extend_ids(ask.prompt_ids)
        if self._allowance(episode) <= 0:
            episode.is_truncated, episode.limit = True, "max_response_tokens"

    def _open(self, episode: Episode, ask: Ask) -> None:
        """Begins the transcript; the ids of an unchanged prompt are those of the data."""
        prompt = episode.prompts.object("prompt")[episode.row]
        is_chat = isinstance(prompt, list)
        known: list[Message] = prompt if is_chat else [{"role": "user", "content": prompt}]
        shown = known if ask.prompt_ids is not None else ask.messages
        is_same = ask.prompt_ids is None and [*shown] == known and not ask.tools
        ids = episode.prompts.tokens("prompt_ids").row(episode.row).tolist() if is_same else ask.prompt_ids
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

    def _allowance(self, episode: Episode) -> int:
        """Maximum length of the next reply. Opponents fork at each question, so only their current prompt counts."""
        asked, left = episode.asked, self._max_response_tokens - episode.asked.num_response_tokens
        if asked is episode.transcripts.get(False):
            left = self._max_prompt_tokens + self._max_response_tokens - len(asked.prompt_ids)
        return min(self._max_turn_tokens, left)

    def _submit(self, running: RunningEpisodes, sampler: ReplySampler) -> None:
        """Begins to sample the replies that episodes wait for; those with the same limit are submitted together."""
        by_limit: dict[int, list[int]] = {}
        for number in running.asking:
            by_limit.setdefault(self._allowance(running.episodes[number]), []).append(number)
        running.asking.clear()
        for limit, numbers in sorted(by_limit.items(), reverse=True):
            names = [running.name(number) for number in numbers]
            prompts = [running.episodes[number].asked.prompt_ids for number in numbers]
            uids, samples = torch.tensor(names, dtype=torch.int64).T
            turns = torch.tensor([running.episodes[number].turns for number in numbers])
            rows = Batch.of(
                rows={"uid": uids, "sample_index": samples, "may_continue": turns + 1 < self._config.max_turns},
                tokens={"prompt_ids": Ragged.from_rows(prompts, torch.int64)},
            )
            sampler.submit(rows, max_tokens=limit)
            running.sampling |= dict(zip(names, numbers, strict=True))

    def take(self, running: RunningEpisodes, sampled: Batch) -> None:
        """Replies that have been sampled go to their environments with the next `deliver`."""
        running.meta = sampled.meta
        running.version = max(sampled.row("weight_version").tolist(), default=running.version)
        ids = sampled.tokens("response_ids")
        replies = zip(
            row_names(sampled),
            ids.rows(),
            sampled.tokens("rollout_logprobs").rows(),
            token_versions(sampled.tokens("version_runs"), ids.lengths).rows(),
            sampled.row("truncated").tolist(),
            strict=True,
        )
        for name, *columns, is_truncated in replies:
            number = running.sampling.pop(name)
            tokens = SampledTokens(*(column.tolist() for column in columns))
            running.requests[number] = self._reply(running, running.episodes[number], tokens, is_truncated=is_truncated)

    def _reply(
        self, running: RunningEpisodes, episode: Episode, sampled: SampledTokens, *, is_truncated: bool
    ) -> Reply:
        """Adds what was sampled to the transcript. A tool call that a limit cut off does not count."""
        transcript, ask = episode.asked, episode.ask
        assert ask is not None, "a reply without a question"
        text, num_prompt_tokens = transcript.text_of(sampled.ids), len(transcript.prompt_ids)
        found = self._calls_in(text) if ask.tools else []
        calls = [] if is_truncated else found
        message: Message = {"role": "assistant", "content": text}
        if calls and all("error" not in call for call in calls):
            message["tool_calls"] = [
                tool_call(call["name"], call["arguments"], index, call.get("id")) for index, call in enumerate(calls)
            ]
        if found and is_truncated:
            running.counts[CUT_CALLS] += 1
            self._log.cut_call(self._max_turn_tokens)
        if not calls and (special := transcript.special_token(sampled.ids)):
            running.counts[SPECIAL_TOKENS] += 1
            self._log.special_token(special)
        transcript.add_reply(sampled, message)
        episode.ask, episode.has_trained_reply = None, ask.is_trained
        episode.turns += 1
        if ask.is_trained:
            episode.is_truncated = is_truncated
        tokens = ([], []) if ask.prompt_ids is None else (sampled.ids, sampled.logprobs)
        return Reply(text, message, calls, is_truncated, num_prompt_tokens, len(sampled.ids), *tokens)
