"""The environment of `environments.py`: five turns, each followed by a delay that its seed determines."""

import random
import time

TURNS = 5
SHAPE, SCALE = 1.0, 0.05
"""A gamma distribution with a mean and a standard deviation of 50 ms."""
ANSWER = " ok?"


def delays(seed: int) -> list[float]:
    """Seconds that each step of an episode takes."""
    generator = random.Random(seed)
    return [generator.gammavariate(SHAPE, SCALE) for _ in range(TURNS)]


class Delayed:
    """Answers each reply with the same text."""

    def reset(self, row, *, seed):
        """Begins with the prompt of the row."""
        self.delays = delays(seed)
        self.turn = 0

    def step(self, action):
        """Takes its time."""
        time.sleep(self.delays[self.turn])
        self.turn += 1
        return ANSWER, 1.0, self.turn == TURNS, {}
