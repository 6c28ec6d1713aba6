"""What ends the process of an episode, or the episode from outside, is not taken for a failure of the environment."""

import asyncio
from collections.abc import Coroutine

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import Ask, Failed, Finished, Model, Reply, Start
from hybridflow.environments.loading import load_environment
from hybridflow.errors import EpisodeError
from tests.unit.environments.players import FILE, Player, prompts_of

CONFIG = EnvironmentSettings(name=f"{FILE}:echo", processes=0)


def episode(*, raises: BaseException | None = None) -> Coroutine[object, object, Finished | Failed]:
    """An episode whose model does not reply, or raises an exception."""

    async def exchange(ask: Ask) -> Reply:
        if raises is not None:
            raise raises
        await asyncio.sleep(60)
        raise AssertionError(ask)

    return run_episode(load_environment(CONFIG), CONFIG, Start({"prompt": "1+1="}, 0), Model(exchange))


def test_an_episode_that_is_cancelled_from_outside_ends_as_cancelled():
    async def cancelled() -> None:
        task = asyncio.ensure_future(episode())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_an_interrupt_ends_the_process():
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(episode(raises=KeyboardInterrupt()))


@pytest.mark.parametrize("has_loop", [False, True])
def test_a_cancellation_that_the_environment_raises_is_its_failure(has_loop):
    started = episode(raises=asyncio.CancelledError("no more"))
    if has_loop:
        ended = asyncio.run(started)
    else:
        with pytest.raises(StopIteration) as stop:
            started.send(None)
        ended = stop.value.value
    assert isinstance(ended, Failed) and "it raised CancelledError: no more" in ended.reason


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("CancelledError", "no more"),
        ("Stops", "no more"),
        ("Mute", "(its text is not known: its __str__ raised ValueError)"),
    ],
)
def test_whatever_an_environment_raises_is_its_failure_with_one_remedy(tokenizer, kind, text, processes):
    name = f"{FILE.with_name('raising_environments.py')}:Raises"
    with (
        Player(tokenizer, name, processes=processes, settings={"kind": kind}) as player,
        pytest.raises(EpisodeError) as error,
    ):
        player.play(prompts_of(tokenizer, ["12+34="]))
    assert f"it raised {kind}: {text} (raising_environments.py, line" in error.value.message
    assert "Fix" not in error.value.message and error.value.remedy.startswith("Fix the environment, or raise")
