"""Settings of the environment."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar

from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1
from hybridflow.config.section import Section


class Credit(Enum):
    """Where the rewards of an episode count."""

    outcome = "outcome"
    turn = "turn"
    return_to_go = "return_to_go"


@dataclass
class EnvironmentSettings(Section):
    """The environment in which the model acts: a conversation of several turns for each prompt."""

    word: ClassVar[str | None] = "name"
    """See `Section.word`."""

    name: str | None = None
    """A built-in name (guess_number, calculator, frozen_lake, kuhn_poker, tools), or a class, coroutine or list of your
    own as `path/file.py:name` or `my_package.name`. null: the model answers each prompt once."""

    program: str | None = None
    """A command that plays an episode, such as `python agent.py`, in place of `name`: it asks the model for replies at
    the OpenAI-style endpoint in OPENAI_BASE_URL, and prints its reward. Started for each episode, without a shell."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class. Of a program: `reward=last_line`, the default, `exit_status` or `none`."""

    mcp: list[str] = field(default_factory=list)
    """Commands of MCP servers on standard input and output, such as `python server.py`, whose tools the model may call
    in addition to those of the environment; `environment=tools` has no others. Each process of the environment starts
    its own servers."""

    max_turns: Annotated[int, AT_LEAST_1] = 8
    """Maximum number of replies of the model in an episode."""

    max_turn_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Maximum number of tokens of a reply; null divides `data.max_response_tokens`, which is the limit of a whole
    episode after its first prompt, by `max_turns`."""

    credit: Credit = Credit.outcome
    """outcome: the last token gets the return of the episode. turn: the last token of each reply gets the reward after
    it, for estimators of rewards per token; with `algorithm.gamma` below 1, later rewards are discounted per token.
    return_to_go: as turn, but `algorithm.gamma` discounts per reply, however long the replies are: the return of reply
    k is r_k + gamma times that of reply k + 1. The scores of training samples are then discounted returns."""

    processes: Annotated[int | None, AT_LEAST_0] = None
    """Number of processes per rollout replica, each of which runs one episode at a time. 0: episodes run in the
    rollout's own process, without time limits. null: 0 for built-in environments without `mcp`; otherwise 8 per CPU
    core, from 16 to 64."""

    step_seconds: Annotated[float, ABOVE_0] = 30.0
    """Time limit of a step of the environment."""

    episode_seconds: Annotated[float, ABOVE_0] = 600.0
    """Time limit of all steps of an episode together, without the time of the model."""

    retries: Annotated[int, AT_LEAST_0] = 2
    """How many times an episode is restarted after its process died, exceeded a time limit, or raised an `OSError`."""

    error_budget: Annotated[int, AT_LEAST_0] = 0
    """Number of episodes per rollout replica that may fail in spite of retries before the run stops. Failed episodes
    are not trained on."""

    @property
    def discounts_replies(self) -> bool:
        """Whether `algorithm.gamma` discounts per reply instead of per token."""
        return self.chosen is not None and self.credit is Credit.return_to_go

    @property
    def chosen(self) -> str | None:
        """The setting that chooses the environment, as the user writes it; None if there is no environment."""
        if self.program is not None:
            return f"environment.program={self.program}"
        return None if self.name is None else f"environment={self.name}"
