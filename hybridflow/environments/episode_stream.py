"""Episodes that run over several calls and updates of the weights, as rows of a rollout engine do."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.row_names import row_names
from hybridflow.environments.play import EpisodePlayer, ReplySampler
from hybridflow.environments.rows import EpisodeResult

WAIT_SECONDS = 0.02
"""How long `poll` waits for environments if there is nothing to sample."""


class StreamSampler(ReplySampler, Protocol):
    """A rollout engine with settings for sampling, which counts its decoding steps."""

    @property
    def num_steps(self) -> int:
        """Decoding steps so far."""
        ...


class EpisodeStream:
    """Rows whose responses are episodes: `submit`, `poll` and `withdraw` as those of a rollout engine.

    Each reply is sampled with the weights of its time. Environments continue to act between two calls of `poll`, and
    that time does not count against their limits. The rows of a prompt are returned together: a failed episode has the
    mean return of the others.

        stream = EpisodeStream(player, sampler, seed=0)
        stream.submit(prompts)
        while stream.num_running:
            finished = stream.poll(max_tokens=16)
    """

    def __init__(self, player: EpisodePlayer, sampler: StreamSampler, *, seed: int) -> None:
        self._player = player
        self._sampler = sampler
        self._seed = seed
        self._groups: dict[int, tuple[Batch, range]] = {}
        """By uid, the rows that have not been returned, and their places."""

        self._running = player.begin(seed)
        self._none = self._columns(_no_rows(), [])
        self._left = time.monotonic()
        """When the last `poll` ended."""

    @property
    def num_running(self) -> int:
        """Rows that neither `poll` nor `withdraw` has returned."""
        return sum(len(rows) for rows, _ in self._groups.values())

    @property
    def num_steps(self) -> int:
        """Decoding steps of the engine so far."""
        return self._sampler.num_steps

    def submit(self, rows: Batch) -> None:
        """Adds episodes; the rows of a prompt must be adjacent."""
        uids, sizes = rows.row("uid").unique_consecutive(return_counts=True)
        with self._dropping():
            for uid, group in zip(uids.tolist(), rows.split(sizes.tolist()), strict=True):
                self._groups[uid] = group, self._player.add(self._running, group)

    def poll(self, *, max_tokens: int) -> Batch:
        """Samples one token per reply and step, until the rows of a prompt have finished, or for `max_tokens` steps.

        Also returns if there is nothing to sample for a moment. Environments in this process have then answered all
        replies, so that the state depends on the number of steps alone. Returns `uid`, `sample_index` and the columns
        of `EpisodePlayer.play`; the batch is empty if no prompt's rows have finished.
        """
        self._player.excuse(time.monotonic() - self._left)
        end, running = self._sampler.num_steps + max_tokens, self._running
        with self._dropping():
            self._player.deliver(running, seconds=WAIT_SECONDS)
            while not (finished := self._finished()) and running.can_sample and self._sampler.num_steps < end:
                self._player.sample(running, self._sampler)
                self._player.deliver(running)
            found = self._returned(finished) if finished else self._none
        self._left = time.monotonic()
        return found

    def withdraw(self, rows: Batch | None = None) -> Batch:
        """The episodes of `rows` get no further reply and end at the limit `deadline`. Without `rows`, drops all.

        A reply that is being sampled ends with the tokens that it has, as at `environment.max_turn_tokens`. Returns no
        rows: `poll` returns those that are withdrawn when their environments have ended.
        """
        if rows is None:
            self.drop()
        else:
            with self._dropping():
                self._player.end_early(self._running, self._sampler, {*row_names(rows)})
        return self._none

    def settle(self) -> None:
        """Samples the replies that have begun to their ends, so that the engine is free for other rows."""
        with self._dropping():
            while self._running.sampling:
                self._player.take(self._running, self._sampler.poll())

    def drop(self) -> None:
        """Ends all episodes without a result."""
        self._running = self._player.begin(self._seed)
        self._groups.clear()
        self._player.abandon(self._sampler)

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._player.close()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drops all episodes if the block is left by an error or an interruption."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _finished(self) -> list[int]:
        """The prompts whose rows have all finished; without any reply so far, they wait for others."""
        if self._running.version is None and self._running.are_left:
            return []
        results = self._running.results
        return [uid for uid, (_, places) in self._groups.items() if all(place in results for place in places)]

    def _returned(self, uids: Sequence[int]) -> Batch:
        """The rows of prompts, which are forgotten."""
        groups = [self._groups.pop(uid) for uid in uids]
        results = [self._running.results.pop(place) for _, places in groups for place in places]
        self._player.clear_caches()
        return self._columns(Batch.concat([rows for rows, _ in groups]), results)

    def _columns(self, rows: Batch, results: Sequence[EpisodeResult]) -> Batch:
        return rows.only(["uid", "sample_index"]).join(self._player.columns(self._running, rows, results))


def _no_rows() -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    prompts = Ragged.from_lengths(none, none)
    return Batch.of(rows={"uid": none, "sample_index": none}, tokens={"prompt_ids": prompts}, objects={"prompt": []})
