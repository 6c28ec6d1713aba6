"""An environment of `asynchrony.py` whose steps take long for some prompts. Imports nothing large."""

import random
import time

TURNS, STEP_SECONDS, TAIL, SLOW_SHARE = 4, 0.1, 10, 1 / 16
"""Turns of an episode, seconds of a step, how many times longer slow ones take, and the share of slow prompts."""


def step_seconds(seed: int) -> float:
    """How long each step of an episode takes."""
    return STEP_SECONDS * (TAIL if random.Random(seed).random() < SLOW_SHARE else 1)


class Tailed:
    """Answers each reply after its time; the reward counts replies with a 1."""

    def reset(self, row: dict, *, seed: int) -> None:
        """Begins with the prompt of the row."""
        self.left, self.seconds = TURNS, step_seconds(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Waits, and answers with a space."""
        time.sleep(self.seconds)
        self.left -= 1
        return " ", float("1" in action), not self.left, {}
