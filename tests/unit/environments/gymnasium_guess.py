"""A text environment of Gymnasium, registered under the name `Guess-v0`."""

import string

import gymnasium
from gymnasium.spaces import Text


class Guess(gymnasium.Env):
    """A number must be guessed, and each answer says in which direction it is."""

    observation_space = Text(80, charset=string.printable)
    action_space = Text(20, charset=string.printable)

    def __init__(self, largest: int = 9) -> None:
        self.largest = largest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1, self.largest + 1))
        return f"Guess a number from 1 to {self.largest}.", {"largest": self.largest}

    def step(self, action):
        distance = abs(int(action) - self.number)
        hint = "Right." if not distance else "Lower." if int(action) > self.number else "Higher."
        return hint, 1.0 - distance / self.largest, not distance, False, {"distance": distance}


gymnasium.register("Guess-v0", entry_point=Guess)
