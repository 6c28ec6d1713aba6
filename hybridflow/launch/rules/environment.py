"""Rules of a run with an environment."""

import inspect
import logging
from collections.abc import Iterator

from hybridflow.config.choices import is_own
from hybridflow.config.environment import Credit, EnvironmentSettings
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.evaluate import Generate
from hybridflow.dataflows.interface import learns_from_samples
from hybridflow.engines.rollout.custom import custom_engine
from hybridflow.environments.loading import load_environment
from hybridflow.environments.mcp_servers import check_servers
from hybridflow.errors import Advice, ConfigError, Problem
from hybridflow.launch.plan.dataflow import WITHOUT_TRAINING
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.workers.named_functions import estimator

logger = logging.getLogger(__name__)

_REWARD = "environment"
"""The reward function that returns what the environment gave."""


def environment_problems(plan: RunPlan) -> Iterator[Problem]:
    """An environment that cannot run an episode, or whose rewards are not used. Logs what was recognized."""
    config, settings = plan.config, plan.config.environment
    rewards = [role.reward for role in plan.roles if role.reward is not None]
    is_scored = any(_REWARD in reward.functions for reward in rewards)
    if settings.chosen is None:
        if is_scored:
            yield ConfigError(
                "reward.functions names 'environment', but the run has no environment.",
                remedy="Set environment=NAME, or name another reward function.",
            )
        if settings.mcp:
            yield ConfigError(
                "environment.mcp gives tools to an environment, but the run has none.",
                remedy="Set environment=tools, or an environment of your own.",
            )
        return
    if plan.dataflow is Generate:
        yield ConfigError(
            f"hybridflow generate samples one reply to each prompt, so {settings.chosen} cannot be used.",
            remedy="Leave out the environment, or play its episodes with hybridflow evaluate.",
        )
        return
    found = load_environment(settings)
    if found.kind is not None:
        logger.info("environment=%s kind='%s'", settings.name, found.kind)
    yield from _server_problems(settings, is_coroutine=found.is_coroutine)
    if not learns_from_samples(plan.dataflow) and config.dataflow not in WITHOUT_TRAINING:
        yield Advice(
            f"{settings.chosen} has no effect: dataflow={config.dataflow} samples no responses.",
            remedy="Use an algorithm that samples responses, such as algorithm=grpo.",
        )
        return
    yield from _size_problems(config)
    yield from _engine_problems(config)
    if rewards and found.gives_rewards != is_scored:
        yield _reward_advice(settings.chosen, gives_rewards=found.gives_rewards)
    if settings.credit is not Credit.outcome and config.dataflow not in WITHOUT_TRAINING:
        yield from _credit_problems(config)


def _reward_advice(chosen: str, *, gives_rewards: bool) -> Advice:
    if gives_rewards:
        return Advice(
            f"{chosen}: the rewards of its episodes are not used.", remedy="Add 'environment' to reward.functions."
        )
    return Advice(
        f"{chosen}: tools alone give no rewards, so 'environment' in reward.functions gives 0.",
        remedy="Name another reward function, or write an environment with reset and step.",
    )


def _server_problems(settings: EnvironmentSettings, *, is_coroutine: bool) -> Iterator[Problem]:
    if not settings.mcp:
        return
    if is_coroutine:
        yield Advice(
            f"environment.mcp has no effect: {settings.chosen} chooses its own tools.",
            remedy="Use an environment with reset and step, such as environment=tools.",
        )
        return
    check_servers(settings)


def _size_problems(config: Experiment) -> Iterator[Problem]:
    settings = config.environment
    if settings.max_turn_tokens is not None and settings.max_turn_tokens > config.data.max_response_tokens:
        yield ConfigError(
            f"environment.max_turn_tokens={settings.max_turn_tokens} is more than a whole episode may have:"
            f" data.max_response_tokens={config.data.max_response_tokens}.",
            remedy="Raise data.max_response_tokens, which counts all replies and observations of an episode.",
        )
    elif config.data.max_response_tokens < settings.max_turns:
        yield Advice(
            f"data.max_response_tokens={config.data.max_response_tokens} is less than a token for each of the"
            f" environment.max_turns={settings.max_turns} replies of an episode, so most episodes will be cut off.",
            remedy="Raise data.max_response_tokens, which counts all replies and observations of an episode, or lower"
            " environment.max_turns.",
        )


def _engine_problems(config: Experiment) -> Iterator[Problem]:
    """An engine of the user's that only generates whole batches."""
    name = config.rollout.engine
    if name is not None and is_own(name):
        engine = custom_engine(name)
        known = {name for name, _ in inspect.getmembers(engine)}
        if missing := [method for method in ("submit", "poll", "withdraw") if method not in known]:
            yield ConfigError(
                f"{config.environment.chosen}: rollout.engine={name} lacks {', '.join(missing)}, with which replies are"
                " sampled while other episodes run.",
                remedy="Derive it from hybridflow.engines.rollout.custom.CustomEngine.",
            )


def _credit_problems(config: Experiment) -> Iterator[Problem]:
    algorithm, credit = config.algorithm, config.environment.credit
    if "rewards" not in estimator(algorithm).parameters:
        yield ConfigError(
            f"environment.credit={credit.value}, but algorithm.advantage={algorithm.advantage} reads only the return of"
            " an episode.",
            remedy="Use environment.credit=outcome, or an estimator of rewards per token, such as gae or"
            " reinforce_plus_plus.",
        )
