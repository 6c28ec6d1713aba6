"""Ranks that hold a replica together: one of them runs the episodes, and all call their engines alike."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybridflow.batch import Batch
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.rollout import Sampling
from hybridflow.environments.episode_log import EpisodeLog, logger
from hybridflow.environments.episode_stream import EpisodeStream
from hybridflow.errors import HybridflowError
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh
from hybridflow.workers.row_sampler import RowSampler
from tests.spmd import run_ranks
from tests.unit.environments.players import Player, prompts_of

TWO = ParallelMesh({"data": 1, "tensor": 2})
ENVIRONMENT = '''
import asyncio, os
from pathlib import Path
from random import SystemRandom

class Drawn:
    """Three turns; all that it says is different in each process, and each time."""

    def reset(self, row, *, seed):
        self.turn = 0

    def step(self, action):
        self.turn += 1
        return f" {SystemRandom().randrange(10**6)}:", SystemRandom().random(), self.turn == 3, {}

class Dies(Drawn):
    """The first episode takes its process along."""

    def step(self, action):
        died = Path(__file__).with_name("died")
        if not died.exists():
            died.touch()
            os._exit(1)
        return super().step(action)

async def sets(model, row):
    await model.reply([{"role": "user", "content": row["prompt"], "set": {1, 2}}])

async def sleeps(model, row):
    await asyncio.sleep(0)
    return 1.0
'''


@dataclass(frozen=True)
class Seen:
    """The episodes as one rank has them, and what it asked its engine."""

    names: list[RowName]
    tokens: list[list[int]]
    returns: list[float]
    meta: dict
    asked: list[list[int]]
    num_steps: int


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(ENVIRONMENT)
    return path


def player_on(rank: int, toy: Path, name: str, settings: dict) -> Player:
    tokenizer = AutoTokenizer.from_pretrained(toy)
    return Player(tokenizer, name, ranks=Ranks(rank, TWO), max_turn_tokens=6, **settings)


def seen(player: Player, found: Batch) -> Seen:
    tokens = [row.tolist() for row in found.tokens("response_ids").rows()]
    asked = [row.tolist() for batch in player.batches for row in batch.tokens("prompt_ids").rows()]
    returns, meta = found.object("episode_return"), dict(found.meta)
    return Seen(row_names(found), tokens, returns, meta, asked, player.engine.num_steps)


def rows(toy: Path) -> Batch:
    return prompts_of(AutoTokenizer.from_pretrained(toy), ["12+34=", "7+8=", "guess:"], samples=2)


def whole_batch(rank: int, toy: Path, name: str, settings: dict) -> Seen:
    """A rank program."""
    with player_on(rank, toy, name, settings) as player:
        return seen(player, player.play(rows(toy)))


def stream(rank: int, toy: Path, name: str, settings: dict) -> Seen:
    """A rank program: rows join others, and some are withdrawn."""
    prompts, parts = rows(toy), []
    with player_on(rank, toy, name, settings) as player:
        episodes = EpisodeStream(player.player, RowSampler(player.engine, Sampling(), 3, 60), seed=3)
        episodes.submit(prompts.slice(0, 4))
        parts.append(episodes.poll(max_tokens=5))
        episodes.submit(prompts.slice(4, 6))
        parts.append(episodes.poll(max_tokens=3))
        episodes.withdraw(prompts.slice(4, 6))
        while episodes.num_running:
            parts.append(episodes.poll(max_tokens=4))
        return seen(player, Batch.concat(parts))


@pytest.mark.parametrize("processes", [0, 3])
@pytest.mark.parametrize("program", [whole_batch, stream])
def test_all_ranks_have_the_episodes_that_the_first_one_runs(toy_dir, file, program, processes):
    first, second = run_ranks(program, 2, toy_dir("llama"), f"{file}:Drawn", {"processes": processes})
    assert first == second
    assert len({*first.names}) == 6 and len({*first.returns}) > 1


def test_an_episode_whose_process_dies_starts_again_on_all_ranks(toy_dir, file):
    first, second = run_ranks(whole_batch, 2, toy_dir("llama"), f"{file}:Dies", {"processes": 2})
    assert first == second
    assert first.meta["environment/retries"] >= 1.0 and len(first.names) == 6


def refused(rank: int, toy: Path, name: str) -> list[str]:
    """A rank program: the errors of two batches."""
    found = []
    with player_on(rank, toy, name, {"processes": 0}) as player:
        for _ in range(2):
            with pytest.raises(HybridflowError) as caught:
                player.play(rows(toy))
            found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("name", "words"), [("sleeps", "needs an event loop"), ("sets", "unless several ranks hold a replica")]
)
def test_an_error_of_the_rank_that_runs_the_episodes_is_that_of_all(toy_dir, file, name, words):
    first, second = run_ranks(refused, 2, toy_dir("llama"), f"{file}:{name}")
    assert first == second
    assert words in first[0] and words in first[1]


def test_only_the_rank_that_runs_the_episodes_logs_them(caplog):
    for is_quiet in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger.name):
            EpisodeLog(EnvironmentSettings(name="frozen_lake"), 8, is_quiet=is_quiet).retry((1, 2), "it died")
        assert ("it died" in caplog.text) is not is_quiet
