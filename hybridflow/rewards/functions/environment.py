"""The return of an episode, for runs with an environment."""

from collections.abc import Sequence

from hybridflow.errors import RewardError


def environment_return(
    completions: list[str], episode_return: Sequence[float] | None = None, **columns: list
) -> list[float]:
    """The sum of the rewards that the environment gave in each episode, which `rollout.generate` has recorded."""
    if episode_return is None:
        raise RewardError(
            "reward.functions=[environment] needs the returns of episodes, but the run has no environment.",
            remedy="Set environment=NAME, or name another function.",
        )
    return [float(value) for value in episode_return]
