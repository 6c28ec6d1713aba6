"""The built-in environments, against their optima."""

import asyncio
import random
import statistics
from itertools import permutations

import pytest

from hybridflow.environments.built_in.calculator import CalculatorTool, calculate
from hybridflow.environments.built_in.frozen_lake import FrozenLake
from hybridflow.environments.built_in.guess_number import GuessNumber
from hybridflow.environments.built_in.kuhn_poker import CARDS, kuhn_poker, won
from hybridflow.environments.interface import Model, Reply
from tests.oracles.environments import best_guessing, kuhn_exploitability, kuhn_value, lake_values


def bisected(highest: int, guesses: int, cost: float, number: int) -> float:
    """The return of bisection for one number."""
    game = GuessNumber(highest, guesses, cost)
    assert game.reset({"number": number}, seed=0) is None
    low, high, total = 1, highest, 0.0
    while True:
        guess = (low + high) // 2
        observation, reward, is_done, _ = game.step(str(guess))
        total += reward
        if is_done:
            return total
        low, high = (low, guess - 1) if observation == "lower" else (guess + 1, high)


@pytest.mark.parametrize(("highest", "guesses", "cost"), [(15, 6, 0.1), (15, 3, 0.1), (31, 5, 0.2), (7, 2, 0.0)])
def test_bisection_reaches_the_optimum_of_guess_the_number(highest, guesses, cost):
    found = statistics.fmean(bisected(highest, guesses, cost, number) for number in range(1, highest + 1))
    assert found == pytest.approx(best_guessing(highest, guesses, cost))


def test_a_reply_without_a_number_is_a_wrong_guess():
    game = GuessNumber(guesses=2)
    game.reset({"number": 5}, seed=0)
    assert game.step("none")[:3] == ("number?", -0.1, False)
    assert game.step("four")[:3] == ("over", 0.1, True)
    game.reset({"number": 5}, seed=0)
    assert game.step("I guess 5, not 7")[1:3] == (1.0, True)


def test_an_episode_that_does_not_find_the_number_returns_0():
    game = GuessNumber(guesses=4)
    game.reset({"number": 5}, seed=0)
    assert sum(game.step("1")[1] for _ in range(4)) == 0.0
    game.reset({"number": 5}, seed=0)
    assert sum(game.step("1")[1] for _ in range(3)) + game.over() == 0.0


def test_guesses_that_cost_more_than_they_can_win_are_refused():
    with pytest.raises(ValueError, match="cost=0.6"):
        GuessNumber(guesses=3, cost=0.6)


def test_the_seed_draws_the_number():
    def answers(seed):
        game = GuessNumber(100)
        game.reset({}, seed=seed)
        return [game.step(str(guess))[0] for guess in (50, 25, 75)]

    assert answers(1) == answers(1) and len({tuple(answers(seed)) for seed in range(20)}) > 2


def walked(game: FrozenLake, values: list, moves: int, seed: int) -> float:
    """The return of the best moves."""
    game.reset({}, seed=seed)
    place = (0, 0)
    for left in range(moves, 0, -1):
        observation, reward, is_done, _ = game.step(values[left][place][1])
        if is_done:
            return reward
        place = tuple(map(int, observation.split(",")))
    raise AssertionError("the episode has not ended")


@pytest.mark.parametrize(("slip", "moves", "episodes"), [(0.0, 6, 1), (0.0, 5, 1), (0.3, 20, 3000), (2 / 3, 50, 2000)])
def test_the_best_moves_reach_the_goal_as_often_as_value_iteration_says(slip, moves, episodes):
    rows = ["SFFF", "FHFH", "FFFH", "HFFG"]
    values = lake_values(rows, slip, moves)
    game = FrozenLake(slip=slip, moves=moves)
    found = statistics.fmean(walked(game, values, moves, seed) for seed in range(episodes))
    expected = values[moves][0, 0][0]
    # Four standard errors of a share; without slips it is exact.
    assert found == pytest.approx(expected, abs=4 * (expected * (1 - expected) / episodes) ** 0.5 + 1e-9)
    assert expected == (0.0 if moves == 5 else 1.0) or slip


def test_a_reply_that_is_not_a_move_leaves_the_place():
    game = FrozenLake(moves=3)
    game.reset({}, seed=0)
    assert [game.step(text)[0] for text in ("left", "north?", "Down ")] == ["0,0", "0,0", "1,0"]


def played(policy, seed: int) -> tuple[float, bool]:
    """A game of poker in which both seats follow a policy; the return, and whether the first seat learns."""
    draw = random.Random(seed + 1)

    async def exchange(ask):
        text = "".join(str(message["content"]) for message in ask.messages)
        card, *words = text.removeprefix("card: ").replace("bet", " bet").replace("pass", " pass").split()
        history = "".join({"pass": "p", "bet": "b"}[word] for word in words)
        word = "bet" if draw.random() < policy(CARDS.index(card), history) else "pass"
        return Reply(word, {"role": "assistant", "content": word})

    reward, info = asyncio.run(kuhn_poker(Model(exchange), {"prompt": "card: "}, seed))
    return reward, bool(info["is_first"])


def equilibrium(card: int, history: str) -> float:
    """One of Kuhn's equilibria: the first player never bets at first with a king's bluff of 0."""
    table = {"": (0, 0, 0), "pb": (0, 1 / 3, 1), "p": (1 / 3, 0, 1), "b": (0, 1 / 3, 1)}
    return table[history][card]


def test_the_oracle_knows_the_value_of_kuhn_poker():
    assert kuhn_value(equilibrium, equilibrium) == pytest.approx(-1 / 18)
    assert kuhn_exploitability(equilibrium) == pytest.approx(0.0)
    assert kuhn_exploitability(lambda card, history: 0.5) == pytest.approx(11 / 12)  # 0.458 for each player


def test_the_winnings_of_all_deals_are_the_oracles():
    for history, bets in (("pp", ()), ("bp", ("",)), ("bb", ("", "b")), ("pbp", ("p",)), ("pbb", ("p", "pb"))):
        policy = lambda card, seen, bets=bets: float(seen in bets)  # noqa: E731
        found = statistics.fmean(won(history, list(deal)) for deal in permutations(CARDS, 2))
        assert found == pytest.approx(kuhn_value(policy, policy))


@pytest.mark.parametrize("policy", [equilibrium, lambda card, history: 0.5])
def test_games_in_self_play_are_worth_what_the_oracle_says(policy):
    games = [played(policy, seed) for seed in range(1500)]
    value = statistics.fmean(reward if is_first else -reward for reward, is_first in games)
    assert value == pytest.approx(kuhn_value(policy, policy), abs=4 * 2 / 1500**0.5)  # winnings are at most 2
    assert 0.4 < statistics.fmean(is_first for _, is_first in games) < 0.6


def test_the_calculator_calculates_and_scores_the_last_number():
    assert [calculate(12, operator, 5) for operator in "+-*/"] == [
        "17",
        "7",
        "60",
        "Error: the operator must be +, - or *.",
    ]
    assert calculate(10**12, "*", 1).startswith("Error")
    task = CalculatorTool()
    assert task.reset({"answer": "24"}) is None
    assert task.step("12+12 is 24")[1:3] == (1.0, True) and task.step("24 or 25")[1] == 0.0
    assert task.step("no idea")[1] == 0.0
