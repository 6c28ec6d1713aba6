"""Environments of other libraries, played to their end: the model sees, and is rewarded with, what the library gives.

`make adapters` installs the libraries and runs these tests.
"""

from importlib import import_module

import pytest

from hybridflow.environments.interface import Failed
from tests.unit.environments.played import Played

SEED = 3
NUMBERS = [str(number) for number in range(1, 21)]
BOXED = [f"\\boxed{{{number}}}" for number in NUMBERS]
BRACKETED = [f"[{number}]" for number in NUMBERS]
GUESS = "tests.unit.environments.gymnasium_guess:Guess-v0"


def driven(env, replies: list[str]) -> tuple[list[str], list[float], dict]:
    """What an environment in the form of Gymnasium shows before each reply, its rewards and its information."""
    observation, _ = env.reset(seed=SEED)
    shown, rewards, known, left = [], [], {}, iter(replies)
    is_done = False
    while not is_done:
        shown.append(observation)
        observation, reward, terminated, truncated, info = env.step(next(left))
        is_done, known = terminated or truncated, known | info
        rewards.append(float(reward))
    return shown, rewards, known


@pytest.mark.parametrize(
    ("name", "settings", "replies", "turns"),
    [
        pytest.param("gymnasium.make", {"id": GUESS}, NUMBERS, 8, marks=pytest.mark.library("gymnasium")),
        pytest.param(
            "gymnasium.make",
            {"id": GUESS, "max_episode_steps": 2},
            NUMBERS,
            2,
            marks=pytest.mark.library("gymnasium"),
            id="gymnasium.make-truncated",
        ),
        pytest.param("gem.make", {"env_id": "game:GuessTheNumber-v0-easy"}, BOXED, 4, marks=pytest.mark.library("gem")),
        pytest.param(
            "gem.envs.game_env.guess_the_number.GuessTheNumberEnv",
            {"max_number": 10, "max_turns": 3},
            BOXED,
            3,
            marks=pytest.mark.library("gem"),
            id="gem-truncated",
        ),
    ],
)
def test_gymnasium_and_gem(name, settings, replies, turns):
    module, _, function = name.rpartition(".")
    shown, rewards, known = driven(vars(import_module(module))[function](**settings), replies)
    found = Played(name, replies, seed=SEED, settings=settings)
    assert found.last_shown == shown and len(set(shown)) > 1
    assert found.finished.rewards == rewards and found.finished.info == known
    assert len(rewards) == turns


@pytest.mark.library("skyrl_gym")
@pytest.mark.parametrize(
    ("kind", "replies"),
    [
        ("gsm8k.multi_turn_env.GSM8kMultiTurnEnv", ["no number", "#### 5", "#### 24"]),
        ("gsm8k.multi_turn_env.GSM8kMultiTurnEnv", ["#### 5", "#### 6", "#### 7"]),
        ("gsm8k.env.GSM8kEnv", ["#### 24"]),
    ],
)
def test_skyrl_gym(kind, replies):
    name = f"skyrl_gym.envs.{kind}"
    module, _, own = name.rpartition(".")
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+12?"}]
    row = {"reward_spec": {"ground_truth": "24"}, "extra_info": {"max_turns": 3}}
    env = vars(import_module(module))[own](env_config={}, extras={**row, "prompt": prompt})
    messages, _ = env.init(prompt)
    asked, rewards, is_done = [], [], False
    for reply in replies:
        assert not is_done
        asked.append(messages)
        output = env.step(reply)
        messages = [*messages, {"role": "assistant", "content": reply}, *output["observations"]]
        rewards, is_done = [*rewards, output["reward"]], output["done"]
    found = Played(name, [*replies, "too late"], prompt=prompt, **row)
    assert is_done and found.finished.rewards == rewards and found.finished.info == {}
    assert [ask.messages for ask in found.asked] == asked


def game(env_id: str, replies: list[str], num_players: int) -> tuple[list[int], dict[int, list], dict, dict]:
    """A game of TextArena: who moved, all observations of each seat, its rewards and its information."""
    env = import_module("textarena").make(env_id=env_id)
    env.reset(num_players=num_players, seed=SEED)
    seats, seen, left, is_done = [], {}, iter(replies), False
    while not is_done:
        player, observation = env.get_observation()
        seats.append(player)
        seen.setdefault(player, []).append(observation)
        is_done, _ = env.step(next(left))
    return seats, seen, *env.close()


def contents(found: Played, turn: int, role: str) -> list[str]:
    """The texts of the messages of a role in what the model was asked."""
    return [str(message["content"]) for message in found.asked[turn].messages if message["role"] == role]


@pytest.mark.library("textarena")
@pytest.mark.parametrize(
    ("env_id", "replies", "num_players"),
    [
        ("GuessTheNumber-v0", BRACKETED, 1),
        ("GuessTheNumber-v0", BRACKETED[::-1], 1),
        ("GuessTheNumber-v0", ["no number", *BRACKETED], 1),
        ("KuhnPoker-v0", ["[check]"] * 6, 2),
        ("KuhnPoker-v0", ["[bet]", "[call]", "[bet]", "[fold]", "[check]", "[check]"], 2),
        ("KuhnPoker-v0", ["[raise]"] * 9, 2),
    ],
)
def test_textarena(env_id, replies, num_players):
    seats, seen, rewards, info = game(env_id, replies, num_players)
    learner = SEED % num_players
    found = Played("textarena.make", replies, seed=SEED, settings={"env_id": env_id, "num_players": num_players})
    finished = found.finished
    assert finished.rewards == [0.0] * (seats.count(learner) - 1) + [float(rewards[learner])]
    assert finished.info == {"seat": learner, **info[learner]}
    assert [ask.is_trained for ask in found.asked] == [seat == learner for seat in seats]
    for seat, observations in seen.items():
        turn = len(seats) - 1 - seats[::-1].index(seat)
        assert "\n".join(contents(found, turn, "user")) == observations[-1]
        assert contents(found, turn, "assistant") == [
            reply for reply, other in zip(replies[:turn], seats, strict=False) if other == seat
        ]


@pytest.mark.library("textarena")
def test_textarena_without_wrappers():
    seats, seen, rewards, info = game("GuessTheNumber-v0-raw", BRACKETED, 1)
    found = Played("textarena.make", BRACKETED, seed=SEED, settings={"env_id": "GuessTheNumber-v0-raw"})
    assert found.finished.rewards == [0.0] * (len(seats) - 1) + [float(rewards[0])]
    assert found.finished.info == {"seat": 0, **info[0]}
    assert found.last_shown == ["\n".join(text for sender, text, _ in each if sender == -1) for each in seen[0]]


TASKS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ''

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.last_reply)

class Config(vf.TasksetConfig):
    highest: int = 3

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for number in range(self.config.highest):
            yield Sum(Data(prompt=f'{number}+{number}=', answer=str(2 * number)), self.config.task)
"""


@pytest.mark.library("verifiers")
@pytest.mark.parametrize(("reply", "rewards"), [("8", [2.0, 1.0]), ("nine", [0.0, 0.25])])
def test_verifiers(tmp_path, reply, rewards):
    (tmp_path / "sums.py").write_text(TASKS)
    name = f"{tmp_path}/sums.py:Sums"
    found = Played(name, [reply], task=4, settings={"taskset": {"highest": 5}})
    assert found.finished.rewards == [sum(rewards)] and found.shown(0) == ["4+4="]
    assert found.finished.info == dict(zip(["correct", "brief"], rewards, strict=True))
    failed = Played(name, [reply], task=4).ended
    assert isinstance(failed, Failed) and "has 3 tasks" in failed.reason
