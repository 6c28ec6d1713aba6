"""Environments for tests, some of which misbehave; loaded by their path, as a user's are."""

import asyncio
import json
import os
import random
import time
from typing import ClassVar

from hybridflow.environments.interface import EpisodeOver
from hybridflow.errors import EpisodeError


def add(first: int, second: int) -> str:
    """Adds two integers.

    Args:
        first: The first integer.
        second: The second integer.
    """
    return str(first + second)


class Once:
    """Ends after one reply, whose length is the reward."""

    def reset(self, row):
        return None

    def step(self, action):
        return "", float(len(action)), True, {}


class Echo:
    """Repeats the beginning of each reply; the rewards count the turns."""

    def __init__(self, turns: int = 3):
        self.turns = turns

    def reset(self, row, *, seed):
        self.seed, self.turn = seed, 0
        return row.get("opening")

    def step(self, action):
        self.turn += 1
        return f" {self.seed % 10}:{action[:4]}", float(self.turn), self.turn == self.turns, {"turns": self.turn}


class GivesUp(Echo):
    def over(self):
        return 100.0


class WaitsForTasks(Echo):
    """Waits in its step for as long as a row says, which needs an event loop."""

    async def reset(self, row, *, seed):
        self.seconds = row["seconds"]
        return super().reset(row, seed=seed)

    async def step(self, action):
        await (asyncio.wait_for(asyncio.sleep(0), 5.0) if self.seconds is None else asyncio.sleep(self.seconds))
        return super().step(action)


class AsyncEcho(Echo):
    """The same with coroutines."""

    async def reset(self, row, *, seed):
        return super().reset(row, seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


async def echo(model, row, seed):
    """The same as a coroutine, with all of the reward at the end."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        reply = await model.reply(messages)
        messages += [reply.message, {"role": "user", "content": f" {seed % 10}:{reply.text[:4]}"}]
    return 6.0, {"turns": model.num_replies}


async def forking(model, row):
    """Forgets the conversation if the row says so."""
    messages = [{"role": "user", "content": row["prompt"]}]
    reply = await model.reply(messages)
    messages += [reply.message, {"role": "user", "content": "on"}]
    await model.reply([{"role": "user", "content": "again"}] if row["forks"] else messages)
    return 1.0


class SlowEcho(Echo):
    """The same after a random time, which no seed determines."""

    def step(self, action):
        time.sleep(random.SystemRandom().random() / 20)
        return super().step(action)


class Waits(Echo):
    """In rows that say so, the first step waits until the episode of another row has ended."""

    def __init__(self, folder: str = ""):
        super().__init__()
        self.folder = folder

    def reset(self, row, *, seed):
        self.must_wait = row["must_wait"]
        return super().reset(row, seed=seed)

    def step(self, action):
        while self.must_wait and not os.listdir(self.folder):
            time.sleep(0.01)
        answer = super().step(action)
        if answer[2]:
            open(f"{self.folder}/ended", "w").close()
        return answer


class Misbehaves(Echo):
    """Does in its second step what the row says, as often as a file in `folder` counts."""

    def __init__(self, folder: str = "", times: int = 10**6):
        super().__init__()
        self.folder, self.times = folder, times

    def reset(self, row, *, seed):
        self.act = row["act"]
        return super().reset(row, seed=seed)

    def step(self, action):
        if self.turn == 1 and self.act != "nothing" and self._is_due():
            return self._misbehave()
        return super().step(action)

    def _is_due(self):
        done = len(os.listdir(self.folder))
        if done < self.times:
            open(f"{self.folder}/{done}", "w").close()
        return done < self.times

    def _misbehave(self):
        acts = {
            "hang": lambda: time.sleep(60),
            "kill": lambda: os.kill(os.getpid(), 9),
            "exit": lambda: os._exit(5),
            "raise": lambda: 1 / 0,
            "parse": lambda: json.loads("{"),
            "huge": lambda: ("text", 1e16, False, {}),
            "end server": lambda: (os.kill(os.getppid(), 9), time.sleep(60)),
            "disconnect": lambda: (_ for _ in ()).throw(ConnectionResetError("gone")),
            "none": lambda: None,
            "three": lambda: ("text", 1.0, False),
            "text reward": lambda: ("text", "failed", True, {}),
            "nan": lambda: ("text", float("nan"), True, {}),
            "done": lambda: ("text", 1.0, "yes", {}),
            "number": lambda: (5, 1.0, False, {}),
            "info": lambda: ("text", 1.0, False, None),
            "long": lambda: ("x" * 500, 1.0, False, {}),
        }
        return acts[self.act]()


class Daemonizes(Echo):
    """Starts a daemon in its first step, and writes its process id to `file`; then exits if it is to."""

    def __init__(self, file: str = "", exits: bool = False):
        super().__init__(turns=1)
        self.file, self.exits = file, exits

    def step(self, action):
        child = os.fork()
        if child == 0:
            os.setsid()
            if daemon := os.fork():
                with open(self.file, "w") as file:
                    file.write(str(daemon))
                os._exit(0)
            os.execvp("sleep", ["sleep", "600"])
        os.waitpid(child, 0)
        if self.exits:
            os._exit(5)
        return super().step(action)


class Says(Echo):
    """Answers the first reply with what the row says."""

    def step(self, action):
        return super().step(action) if self.turn or self.says is None else self._say()

    def reset(self, row, *, seed):
        self.says = row["says"]
        return super().reset(row, seed=seed)

    def _say(self):
        self.turn += 1
        return self.says, 1.0, False, {}


async def asks(model, row):
    """Asks the model what the row says."""
    await model.reply(row["prompt"] if row["says"] is None else row["says"])
    return 1.0


async def asks_again(model, row):
    """The same, and asks properly if that was an error."""
    try:
        await model.reply(row["says"])
    except EpisodeError as error:
        await model.reply(row["prompt"])
        return 0.5, {"said": str(error)}
    return 1.0


async def insists(model, row):
    """Asks on after its limit, also with a shorter conversation; the reward counts the refusals."""
    messages = [{"role": "user", "content": row["prompt"]}]
    reply = await model.reply(messages)
    refusals = 0
    for text in (" much more than there is room for", " again", ""):
        try:
            await model.reply([*messages, reply.message, {"role": "user", "content": text}] if text else messages)
        except EpisodeOver:
            refusals += 1
    return float(refusals)


async def twice(model, row):
    """Asks what the row says, perhaps after something else."""
    if row["forks"]:
        await model.reply(row["prompt"])
    await model.reply(row["says"])
    return 1.0


async def silent(model, row):
    """Does not ask the model."""
    return 1.0


async def impatient(model, row):
    """Stops waiting for a reply once, or for its last one too; the reward counts the tokens of the other prompts."""
    first = [{"role": "user", "content": row["prompt"]}]
    reply = await model.reply(first)
    prompts, messages = reply.num_prompt_tokens, [*first, reply.message]
    await _unanswered(model, [*messages, {"role": "user", "content": " first question"}])
    messages.append({"role": "user", "content": " another"})
    reply = await model.reply(messages)
    if row["again"]:
        await _unanswered(model, [*messages, reply.message, {"role": "user", "content": " the last"}])
    return float(prompts + reply.num_prompt_tokens)


async def hasty(model, row):
    """Does not wait for its first reply."""
    await _unanswered(model, [{"role": "user", "content": "other"}])
    reply = await model.reply([{"role": "user", "content": row["prompt"]}])
    return float(reply.num_prompt_tokens)


async def _unanswered(model, messages):
    asked = asyncio.ensure_future(model.reply(messages))
    for _ in range(5):
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])


class Informs(Echo):
    """Returns information from `reset` too, as Gymnasium's environments do."""

    def reset(self, row, *, seed):
        super().reset(row, seed=seed)
        return "begin: ", {"level": 1}


class FailsTwice(Echo):
    """Fails in its first step, and then when it is closed."""

    def step(self, action):
        raise ZeroDivisionError("the cause")

    def close(self):
        raise ValueError("closing")


class FailsToClose(Echo):
    def close(self):
        raise ValueError("closing")


class Counts:
    """Has a method as a tool, declared in the class."""

    def __init__(self):
        self.total = 0

    def count(self, number: int) -> str:
        """Adds to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return f"total {self.total}"

    tools: ClassVar = [count]

    def reset(self, row):
        return None

    def step(self, action):
        return "", float(self.total), True, {}


class CountsMore(Counts):
    """Inherits the tool."""


class CountsTwice(Counts):
    """Overrides the tool."""

    def count(self, number: int) -> str:
        """Adds twice to the total.

        Args:
            number: What to add.
        """
        return super().count(2 * number)


class CountsByProperty(Counts):
    """Gives its tools by a property."""

    @property
    def tools(self):
        return [self.count]


class Adds:
    """Has a tool."""

    def __init__(self):
        self.tools = [add]

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else None

    def step(self, action):
        return "", float(action == "24"), True, {}


class NoStep:
    def reset(self, row):
        return None


class NoReset:
    def step(self, action):
        return "", 0.0, True, {}


class StepsIntoNothing:
    def reset(self, row):
        return None

    def step(self, action) -> None: ...


class WantsMore:
    def reset(self, row, level):
        return None

    def step(self, action):
        return "", 0.0, True, {}


def plain(model, row):
    return 0.0


async def other(prompt):
    return 0.0


WORD = "no environment"


async def two_replies(model, row):
    """Two replies with a text between them."""
    messages = [{"role": "user", "content": row["prompt"]}]
    reply = await model.reply(messages)
    await model.reply([*messages, reply.message, {"role": "user", "content": " again"}])
    return 0.75
