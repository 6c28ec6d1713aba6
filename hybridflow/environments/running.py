"""The state of episodes: rows that wait, episodes that run, and results."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from hybridflow.batch import Batch
from hybridflow.batch.episode_counts import COUNTED, DEADLINE
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.batch.wire import Meta
from hybridflow.environments.interface import Ask, Finished, Request, Start
from hybridflow.environments.rows import EpisodeResult
from hybridflow.environments.transcript import Transcript

TURN_STRIDE = 1 << 32
"""Turn t of sample i draws with the sample index i + t * 2^32, so no two turns share random numbers, and the first
draws those of a response without an environment."""


@dataclass
class Episode:
    """The episode of a row of `prompts`; a retry starts with a new object."""

    prompts: Batch
    row: int
    name: RowName
    place: int
    """Its number among all rows that were added."""

    attempt: int = 0
    transcripts: dict[bool, Transcript] = field(default_factory=dict)
    """By whether they are trained on."""

    ask: Ask | None = None
    turns: int = 0
    is_truncated: bool = False
    limit: str | None = None
    """The limit that it has reached: it gets no further reply."""

    is_withdrawn: bool = False
    """Whether it gets no further reply: the deadline of its group has passed."""

    has_trained_reply: bool = True
    """Whether the last reply was one to train on."""

    @property
    def asked(self) -> Transcript:
        """The transcript of the question that it waits for."""
        assert self.ask is not None, "no question is open"
        return self.transcripts[self.ask.is_trained]

    def may_start_again(self, retries: int) -> bool:
        """Whether it starts again if its environment fails."""
        return self.attempt < retries and not self.is_withdrawn

    def forget_reply(self) -> None:
        """Removes the last reply, which the episode has not received, and the question for it."""
        if not self.transcripts[self.has_trained_reply].forget_reply():
            del self.transcripts[self.has_trained_reply]
        self.is_truncated = False


class RunningEpisodes:
    """The episodes of rows that are added. Each has a number, and one that runs is in one of three states.

    Its environment acts (from `start`, and from a request until its event), it is in `asking` (its question waits to be
    sampled), or its reply is being sampled (`sampling`).
    """

    def __init__(self, seed: int, numbers: count, *, is_whole_batch: bool = False) -> None:
        """`is_whole_batch`: all episodes are added before the first of them is played."""
        self.waiting: deque[Episode] = deque()
        """Episodes that have not started."""

        self.episodes: dict[int, Episode] = {}
        """Those that run, by number."""

        self.requests: dict[int, Request] = {}
        """Requests that environments must get next."""

        self.asking: list[int] = []
        self.sampling: dict[RowName, int] = {}
        """The numbers of episodes whose reply is being sampled."""

        self.results: dict[int, EpisodeResult] = {}
        """Results by place."""

        self.version: int | None = None
        """The weights that sampled the last reply, or of several the newest."""

        self.meta: Meta = {}
        self.counts: Counter[str] = Counter()
        """Numbers of events, by the names of their metrics."""

        self.is_whole_batch = is_whole_batch
        self._seed = seed
        self._numbers = numbers
        self._num_rows = 0

    def add(self, prompts: Batch) -> range:
        """Adds the episodes of a batch's rows, and returns their places."""
        places = range(self._num_rows, self._num_rows + len(prompts))
        self._num_rows = places.stop
        names = zip(places, row_names(prompts), strict=True)
        self.waiting.extend(Episode(prompts, row, name, place) for row, (place, name) in enumerate(names))
        return places

    @property
    def can_sample(self) -> bool:
        """Whether a reply is being sampled, or a question waits for one."""
        return bool(self.sampling or self.asking)

    @property
    def are_acting(self) -> bool:
        """Whether the environment of an episode acts."""
        return len(self.episodes) > len(self.sampling) + len(self.asking) + len(self.requests)

    @property
    def are_left(self) -> bool:
        """Whether an episode has not ended."""
        return bool(self.waiting or self.episodes)

    def start(self) -> None:
        """Starts the next episode that waits."""
        episode, number = self.waiting.popleft(), next(self._numbers)
        self.episodes[number] = episode
        row = {name: values[episode.row] for name, values in episode.prompts.objects.items()}
        self.requests[number] = Start(row, environment_seed(self._seed, episode.name[0]))

    def take_requests(self) -> dict[int, Request]:
        """The requests that are due, once."""
        taken, self.requests = self.requests, {}
        return taken

    def finish_early(self, episode: Episode) -> None:
        """Records the result of an episode that is withdrawn before it starts."""
        self.results[episode.place] = EpisodeResult(None, Finished([]), 0, is_truncated=True, limit=DEADLINE)

    def drain_counts(self) -> Counter[str]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def name(self, number: int) -> RowName:
        """The name of the row that samples the next reply of an episode."""
        episode = self.episodes[number]
        uid, sample = episode.name
        return uid, sample + episode.turns * TURN_STRIDE

    def retry(self, number: int) -> None:
        """Puts the row of a failed episode back, to start first."""
        self.counts[f"{COUNTED}retries"] += 1
        lost = self.episodes.pop(number)
        self.waiting.appendleft(Episode(lost.prompts, lost.row, lost.name, lost.place, lost.attempt + 1))

    def finish(self, number: int, ended: Finished | None) -> None:
        """Records the result of an episode; None for one that failed."""
        episode = self.episodes.pop(number)
        transcript = episode.transcripts.get(True)
        self.results[episode.place] = EpisodeResult(
            transcript, ended, episode.turns, episode.is_truncated, episode.limit
        )


def environment_seed(seed: int, uid: int) -> int:
    """The seed of an episode, which all samples of a prompt share."""
    return (seed * 1_000_003 + uid) & 0x7FFFFFFF
