"""Guess the number: only a policy that remembers earlier answers finds it."""

import random
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The model guesses a number from 1 to `highest`, at most `guesses` times, and learns if it is lower or higher.

    The right number is rewarded with 1, and each wrong guess costs `cost`. An episode in which the number is not found
    returns 0: its last reward gives the costs back. Bisection is optimal. A reply without a number is a wrong guess.
    """

    def __init__(self, highest: int = 15, guesses: int = 6, cost: float = 0.1) -> None:
        if cost * (guesses - 1) > 1:
            raise ValueError(f"the last guess would cost more than it can win: cost={cost}, guesses={guesses}")
        self._highest, self._guesses, self._cost = highest, guesses, cost
        self._number = self._asked = 0
        self._paid = 0.0

    def reset(self, row: Mapping[str, object], *, seed: int) -> str | None:
        """Draws the number from the seed; a row with `number` gives it."""
        number = row.get("number")
        self._number = int(str(number)) if number is not None else random.Random(seed).randint(1, self._highest)
        self._asked, self._paid = 0, 0.0
        return None

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Whether the number is lower or higher than the first number in the reply."""
        self._asked += 1
        found = _NUMBER.search(action[:20])
        guess = int(found[0]) if found else None
        info = {"is_found": guess == self._number, "guesses": self._asked}
        if guess == self._number:
            return "right", 1.0, True, info
        if self._asked == self._guesses:
            return "over", self._paid, True, info
        self._paid += self._cost
        answer = "number?" if guess is None else "lower" if self._number < guess else "higher"
        return answer, -self._cost, False, info

    def over(self) -> float:
        """Gives the costs back to an episode that ends at another limit."""
        return self._paid
