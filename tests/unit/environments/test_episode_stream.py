"""Episodes over several calls and updates of the weights: tokens, their versions, and early ends."""

import time

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.batch.episode_counts import summed_counts
from hybridflow.batch.row_names import row_names
from hybridflow.batch.versions import token_versions
from hybridflow.config.rollout import Sampling
from hybridflow.environments.episode_stream import EpisodeStream
from hybridflow.errors import EpisodeError
from hybridflow.workers.row_sampler import RowSampler
from tests.oracles.training import response_logprobs, rows_of
from tests.unit.environments.players import Player, prompts_of
from tests.unit.environments.test_play import EXACT, TEXTS, ids_of

SETTINGS = {"max_turn_tokens": 6}


def streamed(player, *, seed=3):
    """A stream that plays with the settings of `player.play`."""
    return EpisodeStream(player.player, RowSampler(player.engine, Sampling(), seed, 60), seed=seed)


def finished(stream, *, max_tokens=16):
    """All rows, in the order of their names."""
    parts = []
    while stream.num_running:
        parts.append(stream.poll(max_tokens=max_tokens))
    found = Batch.concat(parts)
    names = row_names(found)
    return found.select(sorted(range(len(names)), key=names.__getitem__))


def set_weights(player, factor, version):
    """Other weights, between two calls of `poll`."""
    player.engine.pause()
    with torch.no_grad():
        for weight in player.model.parameters():
            weight.mul_(factor)
    player.engine.resume(version=version)


@pytest.mark.parametrize("max_tokens", [1, 4, 100])
@pytest.mark.parametrize(("name", "processes"), [("Echo", 0), ("SlowEcho", 3), ("forking", 0)])
def test_without_an_update_episodes_are_those_of_a_whole_batch(tokenizer, name, processes, max_tokens):
    columns = {"forks": [True, False] * 4} if name == "forking" else {}
    prompts = prompts_of(tokenizer, TEXTS, samples=2).with_columns(objects=columns)
    with Player(tokenizer, name, processes=processes, **SETTINGS) as player:
        whole = player.play(prompts)
        stream = streamed(player)
        stream.submit(prompts.slice(0, 4))
        parts = [stream.poll(max_tokens=3)]
        stream.submit(prompts.slice(4, 8))
        parts.append(finished(stream, max_tokens=max_tokens))
        assert player.engine.num_running == 0
    found = Batch.concat(parts)
    assert row_names(found) == row_names(whole) and ids_of(found) == ids_of(whole)
    for column in ("messages", "episode_return", "prompt", "fork_places", "reply_rewards"):
        assert found.object(column) == whole.object(column)
    for column in ("response_mask", "fork_starts", "turn_rewards", "version_runs"):
        assert ids_of(found, column) == ids_of(whole, column)
    logprobs = found.tokens("rollout_logprobs").values, whole.tokens("rollout_logprobs").values
    assert torch.allclose(*logprobs, atol=EXACT)


def test_each_token_has_the_version_of_the_weights_that_sampled_it(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, **SETTINGS) as player:
        stream, parts = streamed(player), []
        stream.submit(prompts)
        scales = [1.0, 1.1, 0.9, 1.05]
        for version, factor in enumerate(scales):
            set_weights(player, factor, version)
            parts.append(stream.poll(max_tokens=4))
        parts.append(finished(stream))
        found = prompts.join(Batch.concat([part for part in parts if len(part)]).only(parts[-1].columns))
        versions = token_versions(found.tokens("version_runs"), found.tokens("response_ids").lengths).rows()
        sampled = [row["response_mask"].bool() for row in rows_of(found)]
        assert {version for each, kept in zip(versions, sampled, strict=True) for version in each[kept].tolist()} == {
            *range(4)
        }
        oldest = [int(each[kept].min()) for each, kept in zip(versions, sampled, strict=True)]
        assert found.row("weight_version").tolist() == oldest
        for version in reversed(range(4)):
            for row, own, kept in zip(rows_of(found), versions, sampled, strict=True):
                of_version = kept & (own == version)
                expected, _ = response_logprobs(player.model, row, 1.0)
                assert torch.allclose(row["rollout_logprobs"][of_version], expected[of_version], atol=EXACT)
            set_weights(player, 1 / scales[version], version)


def test_other_rows_can_be_sampled_while_episodes_wait(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    here = SETTINGS | {"processes": 0}
    with Player(tokenizer, "Echo", **here) as player, Player(tokenizer, "Echo", **here) as other:
        whole = player.play(prompts)
        stream = streamed(player)
        stream.submit(prompts)
        parts = [stream.poll(max_tokens=3)]
        stream.settle()
        sampler = RowSampler(player.engine, Sampling(temperature=0.0), 4, 60)
        evaluated = other.player.play(prompts, sampler, seed=4, is_evaluation=True)
        assert evaluated.row("turns").tolist() == [3.0] * 8
        parts.append(finished(stream))
    assert ids_of(Batch.concat(parts)) == ids_of(whole)


@pytest.mark.parametrize("processes", [0, 2])
def test_withdrawn_episodes_end_with_what_their_environments_give(tokenizer, processes):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    settings = {"settings": {"turns": 4}, "processes": processes, "max_turn_tokens": 10, "max_turns": 9}
    with Player(tokenizer, "GivesUp", **settings) as player:
        stream = streamed(player)
        stream.submit(prompts)
        parts = []
        while stream.num_steps < 8:
            parts.append(stream.poll(max_tokens=1))  # replies are being sampled; with two processes, most rows wait
        assert not any(map(len, parts))
        names = prompts.slice(0, 6).only(["uid", "sample_index"])
        assert len(stream.withdraw(names)) == 0
        while stream.num_running:
            parts.append(stream.poll(max_tokens=1))
        assert player.engine.num_running == 0
    found = Batch.concat(parts)
    rows = dict(zip(row_names(found), zip(rows_of(found), found.object("episode_return"), strict=True), strict=True))
    ends = [rows[name] for name in row_names(names)]
    assert sorted(rows) == row_names(prompts) and [rows[name][1] for name in row_names(prompts)[6:]] == [10.0] * 2
    waited = [row for row, value in ends if not value]  # for a place, or for the first reply
    assert all(100.0 <= value < 110.0 for _, value in ends if value) and (
        4 <= len(waited) <= 5 if processes else not waited
    )
    assert not any(len(row["response_ids"]) for row in waited)
    assert summed_counts(part.meta for part in parts)["environment/limited/deadline"] == 6.0


def test_a_failed_episode_has_the_mean_return_of_its_prompts_others(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS[:2], samples=3).with_columns(objects={"act": ["nothing"] * 4 + ["raise"] * 2})
    settings = {"folder": str(tmp_path)}
    with Player(tokenizer, "Misbehaves", settings=settings, processes=0, error_budget=2, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        found = finished(stream)
    assert found.object("episode_return") == [6.0] * 6 and found.row("failed").tolist() == [False] * 4 + [True] * 2
    assert found.meta["environment/failures"] == 2.0


def test_an_error_ends_all_episodes_and_others_can_begin(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS, act=["nothing", "raise", "nothing", "nothing"])
    with Player(tokenizer, "Misbehaves", processes=4, settings={"folder": str(tmp_path)}, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        with pytest.raises(EpisodeError, match="ZeroDivisionError"):
            finished(stream)
        assert (stream.num_running, player.engine.num_running) == (0, 0)
        stream.submit(prompts.slice(2, 4))
        assert finished(stream).object("episode_return") == [6.0] * 2


def test_all_failed_episodes_wait_for_a_reply_of_another_prompt(tokenizer, tmp_path):
    prompts = prompts_of(tokenizer, TEXTS[:2], says=[5, None])
    with Player(tokenizer, "asks", processes=0, error_budget=9) as player:
        stream = streamed(player)
        stream.submit(prompts)
        found = finished(stream)
        assert found.row("failed").tolist() == [True, False] and found.row("weight_version").tolist() == [0, 0]
        stream.drop()
        stream.submit(prompts.slice(0, 1))
        with pytest.raises(EpisodeError, match="None of the 1 episodes of this rank has a reply"):
            finished(stream)


def test_time_between_two_calls_does_not_count_against_the_limits(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:1], seconds=[1.2])
    limits = {"step_seconds": 1.0, "episode_seconds": 1.5, "retries": 0, "settings": {"turns": 1}}
    with Player(tokenizer, "WaitsForTasks", processes=1, **limits, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        while not player.batches and stream.num_steps < 6:
            stream.poll(max_tokens=6)
        stream.poll(max_tokens=1)  # its step has begun
        time.sleep(0.7)
        assert finished(stream).object("episode_return") == [1.0]


class Lost:
    """Loses its connection when it is told that it gets no further reply."""

    def reset(self, row):
        return None

    def step(self, action):
        return "on", 1.0, False, {}

    def over(self):
        raise ConnectionResetError("gone")


def test_a_withdrawn_episode_does_not_start_again(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:1])
    settings = {"processes": 0, "max_turns": 9, "retries": 3, "error_budget": 1}
    with Player(tokenizer, f"{__file__}:Lost", **settings, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        stream.poll(max_tokens=4)
        stream.withdraw(prompts)
        found = stream.poll(max_tokens=1)
    assert found.row("failed").tolist() == [True] and "environment/retries" not in found.meta
    assert found.meta["environment/failures"] == 1.0 and found.meta["environment/limited/deadline"] == 0.0


@pytest.mark.parametrize("name", ["Echo", "insists"])
def test_what_is_returned_depends_on_the_steps_alone(tokenizer, name):
    """Not on how many calls take them, so that a replay that repeats the numbers of steps gets the same rows."""
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, name, processes=0, **SETTINGS) as player:
        stream, calls = streamed(player), []
        stream.submit(prompts)
        while stream.num_running:
            before = stream.num_steps
            calls.append((row_names(stream.poll(max_tokens=4)), stream.num_steps - before))
        stream.submit(prompts)
        for names, steps in calls:
            assert steps and row_names(stream.poll(max_tokens=steps)) == names


def test_limits_are_counted_with_the_rows_that_are_returned(tokenizer):
    prompts = prompts_of(tokenizer, TEXTS, samples=2)
    with Player(tokenizer, "Echo", processes=0, max_turns=1, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        while stream.num_running:
            part = stream.poll(max_tokens=1)
            assert part.meta.get("environment/limited/max_turns", 0.0) == len(part)


@pytest.mark.parametrize("method", ["settle", "poll"])
def test_an_interruption_drops_all_episodes(tokenizer, monkeypatch, method):
    prompts = prompts_of(tokenizer, TEXTS)
    with Player(tokenizer, "Echo", processes=0, **SETTINGS) as player:
        stream = streamed(player)
        stream.submit(prompts)
        stream.poll(max_tokens=2)
        with monkeypatch.context() as patched:
            patched.setattr(player.player, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.settle() if method == "settle" else finished(stream)
        assert (stream.num_running, player.engine.num_running) == (0, 0)
        stream.settle()
        stream.submit(prompts)
        assert finished(stream).object("episode_return") == [6.0] * 4


def interrupted(*_):
    raise KeyboardInterrupt
