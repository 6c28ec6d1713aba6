"""An environment as TRL's `environment_factory` takes it, and a list of its `tools`."""


def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: The number.
    """
    return str(2 * number)


TOOLS = [double]


class Counter:
    """The reward depends on a tool with state, and on the row."""

    def reset(self, **row) -> str:
        self.count, self.goal = 0, int(row["answer"])
        return f" Count to {self.goal}."

    def increment(self, by: int, note: str = "") -> str:
        """Increments the counter.

        Args:
            by: The number to add.
            note: A remark.
        """
        self.count += by
        return f"{note}{self.count}"

    def get_reward(self) -> float:
        return 1.0 / (1 + abs(self.count - self.goal))
