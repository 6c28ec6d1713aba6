"""Environments for tests, some of which misbehave; loaded by their path, as a user's are."""

import asyncio
import os
import random
import time


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
