"""The state of the episodes of a batch: rows that wait, episodes that run, and results."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from hybridflow.batch import Batch
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.batch.wire import Meta
from hybridflow.environments.interface import Ask, Finished, Request, Start
from hybridflow.environments.rows import EpisodeResult
from hybridflow.environments.transcript import Transcript

TURN_STRIDE = 1 << 32
"""Turn t of sample i draws with the sample index i + t * 2^32, so no two turns share random numbers, and the first
draws those of a response without an environment."""

LIMITED = "environment/limited/"
"""Part of the names under which episodes that ended at a limit are counted, by limit."""


@dataclass
class Episode:
    """An episode in progress; a retry starts with a new object."""

    row: int
    attempt: int = 0
    transcripts: dict[bool, Transcript] = field(default_factory=dict)
    """By whether they are trained on."""

    ask: Ask | None = None
    turns: int = 0
    version: int | None = None
    is_truncated: bool = False
    limit: str | None = None
    """The limit that it has reached: it gets no further reply."""

    has_trained_reply: bool = True
    """Whether the last reply was one to train on."""

    @property
    def asked(self) -> Transcript:
        """The transcript of the question that it waits for."""
        assert self.ask is not None, "no question is open"
        return self.transcripts[self.ask.is_trained]

    def forget_reply(self) -> None:
        """Removes the last reply, which the episode has not received, and the question for it."""
        if not self.transcripts[self.has_trained_reply].forget_reply():
            del self.transcripts[self.has_trained_reply]
        self.is_truncated = False

    def sampled_by(self, version: int) -> None:
        """Records the version of the weights that sampled a reply; the oldest counts."""
        self.version = version if self.version is None else min(self.version, version)


class RunningEpisodes:
    """The episodes of a batch. Each has a number, and one that runs is in one of three states.

    Its environment acts (from `start`, and from a request until its event), it is in `asking` (its question waits to be
    sampled), or its reply is being sampled (`sampling`).
    """

    def __init__(self, prompts: Batch, seed: int, numbers: count) -> None:
        self.prompts = prompts
        self.prompt_ids = prompts.tokens("prompt_ids").rows()
        self._row_names = row_names(prompts)
        self.waiting = deque(Episode(row) for row in range(len(prompts)))
        """Episodes that have not started."""

        self.episodes: dict[int, Episode] = {}
        """Those that run, by number."""

        self.requests: dict[int, Request] = {}
        """Requests that environments must get next."""

        self.asking: list[int] = []
        self.sampling: dict[RowName, int] = {}
        """The numbers of episodes whose reply is being sampled."""

        self.results: dict[int, EpisodeResult] = {}
        """Results by row."""

        self.meta: Meta = {}
        self.counts: Counter[str] = Counter()
        """Numbers of events, by the names of their metrics."""

        self._seed = seed
        self._numbers = numbers

    @property
    def are_left(self) -> bool:
        """Whether an episode has not ended."""
        return bool(self.waiting or self.episodes)

    def start(self) -> None:
        """Starts the next episode that waits."""
        episode, number = self.waiting.popleft(), next(self._numbers)
        self.episodes[number] = episode
        row = {name: values[episode.row] for name, values in self.prompts.objects.items()}
        self.requests[number] = Start(row, environment_seed(self._seed, self._row_names[episode.row][0]))

    def take_requests(self) -> dict[int, Request]:
        """The requests that are due, once."""
        taken, self.requests = self.requests, {}
        return taken

    def name(self, number: int) -> RowName:
        """The name of the row that samples the next reply of an episode."""
        episode = self.episodes[number]
        uid, sample = self._row_names[episode.row]
        return uid, sample + episode.turns * TURN_STRIDE

    def retry(self, number: int) -> None:
        """Puts the row of a failed episode back, to start first."""
        self.counts["environment/retries"] += 1
        lost = self.episodes.pop(number)
        self.waiting.appendleft(Episode(lost.row, lost.attempt + 1))

    def finish(self, number: int, ended: Finished | None) -> None:
        """Records the result of an episode; None for one that failed."""
        episode = self.episodes.pop(number)
        self.counts["environment/failures"] += ended is None
        if ended is not None and episode.limit is not None:
            self.counts[f"{LIMITED}{episode.limit}"] += 1
        transcript = episode.transcripts.get(True)
        self.results[episode.row] = EpisodeResult(
            transcript, ended, episode.version, episode.turns, episode.is_truncated
        )


def environment_seed(seed: int, uid: int) -> int:
    """The seed of an episode, which all samples of a prompt share."""
    return (seed * 1_000_003 + uid) & 0x7FFFFFFF
