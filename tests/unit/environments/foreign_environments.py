"""Environments and tools as users of other systems write them, in the forms that these document."""

from types import SimpleNamespace

from tests.unit.environments.toy_environments import add


class Corridor:
    """In the form of Gymnasium and GEM."""

    def __init__(self, length: int = 2):
        self.length = length

    def reset(self, seed=None):
        self.place = 0
        return f"seed {seed}: go", {"suffix": "next"}

    def step(self, action):
        self.place += 1
        return f"at {self.place}", 0.5, self.place == self.length, False, {"place": self.place}

    def close(self):
        print("closed")


class OldCorridor(Corridor):
    """With the four values of older versions, and no seed."""

    def reset(self):
        return super().reset()[0]

    def step(self, action):
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


def make(env_id: str, **settings):
    """As `gem.make` and `gymnasium.make`."""
    return {"corridor": Corridor, "nothing": SimpleNamespace}[env_id](**settings)


class Tries:
    """In the form of SkyRL-Gym."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006  as its own environments declare it
        self.answer, self.left = extras["answer"], env_config["tries"]

    def init(self, prompt):
        return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']} Try!"}], {}

    def step(self, action):
        self.left -= 1
        is_right = action == self.answer
        done = is_right or self.left == 0
        again = [] if done else [{"role": "user", "content": "Again."}]
        return {"observations": again, "reward": float(is_right), "done": done, "metadata": {"left": self.left}}


class Counter:
    """In the form of TRL's `environment_factory`."""

    def reset(self, **row):
        self.count, self.goal = 0, int(row["answer"])
        return f" Count to {self.goal}."

    def increment(self, by: int) -> str:
        """Increments the counter.

        Args:
            by: The number to add.
        """
        self.count += by
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _private(self):
        raise AssertionError


class Chats(Counter):
    """It returns messages, which TRL does not take."""

    def reset(self, **row):
        return [{"role": "user", "content": "Go."}]


class AsyncCounter(Counter):
    """The same with coroutines."""

    async def increment(self, by: int) -> str:
        """Increments the counter.

        Args:
            by: The number to add.
        """
        return super().increment(by)

    async def get_reward(self) -> float:
        return super().get_reward()


TOOLS = [add]
"""As TRL's `tools=[...]`, and functions with verl's `@function_tool`."""

UNTYPED_TOOLS = [lambda first: first]
NO_TOOLS = []


class Duel:
    """In the form of TextArena: two players name numbers, and the larger one wins."""

    def reset(self, num_players, seed=None):
        assert num_players == 2
        self.named, self.player = {}, 0

    def get_observation(self):
        return self.player, [(-1, "Name a number.", "PROMPT"), (1 - self.player, "(hidden)", "PLAYER_ACTION")]

    def step(self, action):
        self.named[self.player] = int(action)
        self.player = 1 - self.player
        return len(self.named) == 2, {}

    def close(self):
        best = max(self.named, key=self.named.__getitem__)
        return {player: 1 if player == best else -1 for player in self.named}, {0: {"turn_count": 1}, 1: {}}


class Repeats(Duel):
    """One player, and observations that repeat everything so far, as wrapped games give them."""

    def reset(self, num_players=1, seed=None):
        assert num_players == 1
        self.text, self.named = "Guess.", {}

    def get_observation(self):
        return 0, self.text

    def step(self, action):
        self.text += f"\n{action} is wrong."
        self.named[len(self.named)] = action
        return len(self.named) == 2, {}

    def close(self):
        return {0: "failed"} if "fail" in self.named.values() else {0: 0.25}, {}


class News(Repeats):
    """The same as a list of messages, which has only the new ones in each turn."""

    def get_observation(self):
        return 0, [(0, "what it did", "PLAYER_ACTION"), (-1, "Guess again.", "GAME_MESSAGE")]


class Board(Repeats):
    """As a wrapper that shows the prompt and the board."""

    def get_observation(self):
        return 0, "The board has not changed."


class Scores(Duel):
    """Gives what the setting says as the reward of each seat and as information of it, and prints when it is closed."""

    def __init__(self, reward=1.0, info=None):
        self.reward, self.info = reward, info

    def step(self, action):
        if action == "raise":
            raise ValueError("no such number")
        return super().step(action)

    def close(self):
        print("closed")
        assert len(self.named) == 2, "the game is not done"
        return dict.fromkeys(self.named, self.reward), dict.fromkeys(self.named, self.info)


class Trio(Duel):
    """Three players, in turns, for six rounds."""

    def reset(self, num_players, seed=None):
        self.turns, self.player = 0, 0

    def step(self, action):
        self.turns, self.player = self.turns + 1, (self.player + 1) % 3
        return self.turns == 18, {}

    def close(self):
        return {0: 1.0, 1: 0.0, 2: 0.0}, {}


def make_game(env_id: str, **settings):
    """As `textarena.make`, which does not take the number of seats."""
    return {"duel": Duel}[env_id](**settings)


class GradesAnswers:
    """In the form of verl's `BaseTool`."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.instances = {}

    async def create(self, instance_id=None, ground_truth="", **kwargs):
        self.instances["one"] = {"truth": ground_truth, "reward": 0.0}
        return "one", SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        own = self.instances[instance_id]
        own["reward"] = float(parameters["answer"] == own["truth"])
        return SimpleNamespace(text=f"reward {own['reward']}"), self.config["penalty"], {}

    async def calc_reward(self, instance_id, **kwargs):
        return self.instances[instance_id]["reward"]

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]
