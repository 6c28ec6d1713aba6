"""Optima of the built-in environments, by exhaustive search."""

from collections.abc import Callable
from functools import cache
from itertools import permutations

Policy = Callable[[int, str], float]
"""The probability of a bet, given a card (0 to 2) and the moves so far (`p` and `b`)."""


def best_guessing(highest: int, guesses: int, cost: float) -> float:
    """The expected reward of the best guesses for a number that is uniform from 1 to `highest`."""

    @cache
    def total(size: int, asked: int) -> float:
        """The sum over the numbers of an interval, after so many wrong guesses."""
        if size == 0 or asked == guesses:
            return 0.0
        splits = [total(left, asked + 1) + total(size - 1 - left, asked + 1) for left in range(size)]
        return max(0.0, 1.0 - cost * asked) + max(splits)

    return total(highest, 0) / highest


def lake_values(rows: list[str], slip: float, moves: int) -> list[dict[tuple[int, int], tuple[float, str]]]:
    """For each number of moves left, each place's probability of reaching the goal, and its best move."""
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    names = list(steps)
    places = [(r, c) for r in range(len(rows)) for c in range(len(rows[0])) if rows[r][c] in "SF"]
    values: list[dict[tuple[int, int], tuple[float, str]]] = [dict.fromkeys(places, (0.0, "up"))]

    def after(place: tuple[int, int], name: str) -> float:
        row = min(max(place[0] + steps[name][0], 0), len(rows) - 1)
        column = min(max(place[1] + steps[name][1], 0), len(rows[0]) - 1)
        field = rows[row][column]
        return 1.0 if field == "G" else 0.0 if field == "H" else values[-1][row, column][0]

    for _ in range(moves):
        found = {}
        for place in places:
            choices = []
            for i, name in enumerate(names):
                sides = [after(place, names[(i + turn) % 4]) for turn in (1, 3)]
                choices.append(((1 - slip) * after(place, name) + slip * sum(sides) / 2, name))
            found[place] = max(choices)
        values.append(found)
    return values


def kuhn_value(first: Policy, second: Policy) -> float:
    """What the first player wins on average."""

    def after(history: str, cards: tuple[int, int]) -> float:
        wins = 1.0 if cards[0] > cards[1] else -1.0
        ends = {"pp": wins, "bb": 2 * wins, "pbb": 2 * wins, "bp": 1.0, "pbp": -1.0}
        if history in ends:
            return ends[history]
        seat = len(history) % 2
        bet = (first, second)[seat](cards[seat], history)
        return bet * after(history + "b", cards) + (1 - bet) * after(history + "p", cards)

    deals = list(permutations(range(3), 2))
    return sum(after("", deal) for deal in deals) / len(deals)


def kuhn_exploitability(policy: Policy) -> float:
    """The sum of what the best responses to a policy win in both seats, found among all deterministic policies."""

    def best(seat: int) -> float:
        points = [(card, history) for card in range(3) for history in (("", "pb") if seat == 0 else ("p", "b"))]
        found = []
        for number in range(2 ** len(points)):
            table = {point: float(number >> bit & 1) for bit, point in enumerate(points)}
            own = lambda card, history, table=table: table[card, history]  # noqa: E731
            found.append(kuhn_value(own, policy) if seat == 0 else -kuhn_value(policy, own))
        return max(found)

    return best(0) + best(1)
