"""Frozen lake in text: a walk over ice with holes, as in Gymnasium's `FrozenLake`."""

import random
from collections.abc import Mapping

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column that each move adds."""


class FrozenLake:
    """The model walks from the upper left corner to the goal without falling into a hole; the reward at the goal is 1.

    `map` has rows of S (start), F (ice), H (hole) and G (goal), joined by /. With probability `slip` a move goes to one
    of the two sides instead. A reply that is not a move leaves the position. After `moves` steps the episode is over.
    """

    def __init__(self, map: str = "SFFF/FHFH/FFFH/HFFG", slip: float = 0.0, moves: int = 20) -> None:
        self._map, self._slip, self._moves = map.split("/"), slip, moves
        self._place = (0, 0)
        self._draw = random.Random(0)
        self._made = 0

    def reset(self, row: Mapping[str, object], *, seed: int) -> str | None:
        """Puts the walker on the start; the seed draws the slips."""
        self._place, self._draw, self._made = (0, 0), random.Random(seed), 0
        return None

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Moves; the observation is the row and column."""
        self._made += 1
        word = action.strip().lower()
        if word in MOVES:
            self._place = moved(self._map, self._place, self._slipped(word))
        field = self._map[self._place[0]][self._place[1]]
        is_over = field in "HG" or self._made == self._moves
        info = {"is_at_goal": field == "G", "moves": self._made}
        return f"{self._place[0]},{self._place[1]}", float(field == "G"), is_over, info

    def _slipped(self, word: str) -> str:
        names = [*MOVES]
        if self._draw.random() >= self._slip:
            return word
        return names[(names.index(word) + self._draw.choice((1, 3))) % 4]


def moved(rows: list[str], place: tuple[int, int], word: str) -> tuple[int, int]:
    """The place after a move, which a wall leaves unchanged."""
    down, right = MOVES[word]
    row, column = place[0] + down, place[1] + right
    is_inside = 0 <= row < len(rows) and 0 <= column < len(rows[0])
    return (row, column) if is_inside else place
