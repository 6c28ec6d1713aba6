"""Runs one episode as a coroutine, which asks for replies, and turns what user code returns or raises into events."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.config.user_code import described, ending_forks
from hybridflow.environments.interface import (
    EpisodeOver,
    Failed,
    Finished,
    Message,
    Model,
    Observation,
    Start,
    awaited,
)
from hybridflow.environments.loading import LoadedEnvironment, made
from hybridflow.environments.mcp_servers import server_tools
from hybridflow.environments.messages import message_flaw
from hybridflow.environments.tools import CallableTool, Toolbox
from hybridflow.errors import EpisodeError, HybridflowError

_STEP = "return observation, reward, done, info"


async def run_episode(
    environment: LoadedEnvironment, config: EnvironmentSettings, start: Start, model: Model
) -> Finished | Failed:
    """Plays an episode to its end; whatever user code raises becomes a `Failed`."""
    try:
        return await _played(environment, config, start, model)
    except _Interrupted as error:
        return Failed(error.message, is_infrastructure=True)
    except HybridflowError as error:
        return Failed(" ".join(text for text in (error.message, error.remedy, *error.__notes__) if text))


class _Interrupted(EpisodeError):
    """An `OSError` of user code, such as a lost connection: another attempt may succeed."""


async def _played(environment: LoadedEnvironment, config: EnvironmentSettings, start: Start, model: Model) -> Finished:
    try:
        with ending_forks():
            play = _play_coroutine if environment.is_coroutine else _play_steps
            return await play(environment, config, start, model)
    except (HybridflowError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        needs_loop = isinstance(error, RuntimeError) and error.args == ("no running event loop",)
        kind, notes = _Interrupted if isinstance(error, OSError) else EpisodeError, error.__dict__.get("__notes__", [])
        raise kind(
            " ".join([f"it raised {described(error, callers={__file__})}.", *notes]),
            remedy="Set environment.processes to 1 or more." if needs_loop else "",  # else, too many failures give one
        ) from error


def _is_cancelled() -> bool:
    """Whether the task of the episode is being cancelled, as by Ctrl-C."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # without an event loop, there are no tasks
        return False
    return task is not None and task.cancelling() > 0


async def _play_coroutine(
    environment: LoadedEnvironment, config: EnvironmentSettings, start: Start, model: Model
) -> Finished:
    seed = {"seed": start.seed} if environment.takes_seed else {}
    try:
        answer = await awaited(environment.make(model, start.row, **seed, **config.settings))
    except EpisodeOver as over:
        return Finished([0.0] * model.num_replies, {"over": str(over)})
    if isinstance(answer, Finished):
        rewards = [_number(reward, "the coroutine", "Return finite numbers.") for reward in answer.rewards]
        return replace(answer, rewards=rewards, info=_plain(answer.info))
    reward, info = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    number = _number(reward, "the coroutine", "Return the reward as a number, or (reward, info).")
    return Finished([*[0.0] * (model.num_replies - 1), number], _plain(info))


async def _play_steps(
    environment: LoadedEnvironment, config: EnvironmentSettings, start: Start, model: Model
) -> Finished:
    own: object = made(environment, config)
    seed = {"seed": start.seed} if environment.takes_seed else {}
    try:
        finished = await _played_by_steps(own, start.row, seed, model, server_tools(config))
    except BaseException as error:
        await _close(own, after=error)
        raise
    await _close(own)
    return finished


async def _played_by_steps(
    own: object, row: Mapping[str, object], seed: Mapping[str, int], model: Model, further: Sequence[CallableTool]
) -> Finished:
    toolbox = Toolbox.of(_attribute(own, "tools") or (), own, further)
    rewards: list[float] = []
    known: dict = {}
    try:
        first = await _called(own, "reset", row, **seed)
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping):
            first = first[0]  # (observation, info), as in Gymnasium
        prompt, is_chat = row["prompt"] if first is None else first, isinstance(row["prompt"], list)
        messages = _messages(prompt, "reset", is_chat=is_chat)
        while True:
            reply = await model.reply(messages, tools=toolbox.schemas)
            messages.append(reply.message)
            if reply.calls:
                answers, reward = await toolbox.answers(reply.calls)
                messages += answers
                rewards.append(_number(reward, "a tool", "Return a finite number."))
                continue
            observation, reward, done, info = _checked_step(await _called(own, "step", reply.text))
            rewards.append(reward)
            known |= info
            if done:
                return Finished(rewards, known)
            messages += _messages(observation, "step", is_chat=is_chat)
    except EpisodeOver as over:
        rewards += [0.0] * (model.num_replies - len(rewards))
        if rewards and _attribute(own, "over") is not None:
            rewards[-1] += _number(await _called(own, "over"), "over", "Return the reward as a number.")
        return Finished(rewards, known | {"over": str(over)})


async def _close(own: object, after: BaseException | None = None) -> None:
    """Calls `close`, if there is one. What it raises after another error becomes a note to that error."""
    if _attribute(own, "close") is None:
        return
    try:
        await _called(own, "close")
    except Exception as error:
        if after is None:
            raise
        after.add_note(f"Its method 'close' then raised {described(error, callers={__file__})}.")


def _attribute(owner: object, name: str) -> object:
    """An attribute of a user's object, which may be inherited; None if there is none."""
    return getattr(owner, name, None)


async def _called(owner: object, method: str, *arguments: object, **named: object) -> object:
    return await awaited(getattr(owner, method)(*arguments, **named))


def _messages(observation: object, method: str, *, is_chat: bool) -> list[Message]:
    """An observation as messages. Raises `EpisodeError` if it is neither text nor messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and observation and is_chat:
        messages = [{"content": "", **message} if isinstance(message, dict) else message for message in observation]
        for place, message in enumerate(messages):
            if flaw := message_flaw(message):
                raise EpisodeError(
                    f"its method '{method}' returned messages of which messages[{place}] {flaw}.",
                    remedy='Write each message as {"role": "user", "content": "..."}.',
                )
        return messages
    wanted = "text or messages" if is_chat else "text, since the prompt of its row is text"
    raise EpisodeError(
        f"its method '{method}' returned {_shown(observation)} as the observation, not {wanted}.",
        remedy="Return what the model is to read next." if method == "step" else "Return the first prompt, or None.",
    )


def _checked_step(answer: object) -> tuple[Observation, float, bool, dict]:
    """The four values of a step. Gymnasium's five are accepted; raises `EpisodeError` for anything else."""
    if not isinstance(answer, tuple) or len(answer) not in (4, 5):
        what = f"{len(answer)} values" if isinstance(answer, tuple) else _shown(answer)
        raise EpisodeError(f"its method 'step' returned {what}, not four values.", remedy=f"Write '{_STEP}'.")
    observation, reward, *ends, info = answer
    for end in ends:
        if not isinstance(end, bool | int) and type(end).__name__ not in ("bool_", "bool"):
            raise EpisodeError(
                f"its method 'step' returned done={_shown(end)}, not True or False.", remedy=f"Write '{_STEP}'."
            )
    return observation, _number(reward, "step", f"Write '{_STEP}'."), any(map(bool, ends)), _plain(info)


def _number(value: object, of: str, remedy: str) -> float:
    """A number in the range of scores; raises `EpisodeError` for anything else, such as a text after a failure."""
    if isinstance(value, Real) and _magnitude(value) <= LARGEST_SCORE:
        return float(value)
    bounds = f"between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
    raise EpisodeError(f"{of} returned the reward {_shown(value)}, not a number {bounds}.", remedy=remedy)


def _magnitude(value: Real) -> float:
    try:
        return abs(float(value))
    except OverflowError:  # of an integer
        return math.inf


def _plain(info: object) -> dict:
    """The information of a step without what JSON cannot represent, and without numbers beyond those of scores."""
    if not isinstance(info, Mapping):
        raise EpisodeError(f"it returned info={_shown(info)}, not a dictionary.", remedy=f"Write '{_STEP}'.")
    plain = {}
    for name, value in info.items():
        if isinstance(value, bool | str):
            plain[str(name)] = value
        elif isinstance(value, Real) and not _magnitude(value) > LARGEST_SCORE:
            plain[str(name)] = value if isinstance(value, int | float) else float(value)
    return json.loads(json.dumps(plain))


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:60]} of type {type(value).__name__}" if value is not None else "None"
