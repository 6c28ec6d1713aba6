"""Rules on rewards: functions that can be found and given their columns, and reward models that can score."""

import logging
from collections.abc import Iterable, Iterator

from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import Advice, ConfigError, Problem
from hybridflow.launch.plan.data_streams import RunData
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.launch.plan.setups import RewardModelRole
from hybridflow.models.classification import RewardModelDescription, describe_reward_model, longest_input
from hybridflow.models.geometry import read_geometry
from hybridflow.models.tokenizers import check_vocabulary
from hybridflow.rewards.resolve import check_settings
from hybridflow.rewards.scorer import RewardScorer
from hybridflow.workers.reward_model import RewardModelInput, reward_model_input

logger = logging.getLogger(__name__)


def reward_problems(plan: RunPlan, data: RunData | None) -> Iterable[Problem]:
    """Reward functions and their servers can be found; the data, if it could be read, has the columns they ask for."""
    rewards = [role.reward for role in plan.roles if role.reward is not None]
    for reward in rewards:
        if reward.functions or reward.model.path is None:
            scorer = RewardScorer(reward)
            if data is not None:
                scorer.check_columns(data.scored_columns)
            scorer.check_servers()
    check_settings(rewards)
    return []


def reward_model_problems(plan: RunPlan) -> Iterator[Problem]:
    """A frozen reward model can score what the policy writes: it has a head, reads its tokens, and enough of them."""
    for role in plan.roles:
        if isinstance(role.setup, RewardModelRole):
            yield from _scores(plan, role, role.setup)


def runs_whole(plan: RunPlan, role: RoleSpec) -> bool:
    """Whether a role is a reward model that transformers runs whole on each device, whatever its family."""
    if not isinstance(role.setup, RewardModelRole):
        return False
    trust = role.setup.reward.model.trust_remote_code
    directory, key = plan.models.directory(role.name), f"{_section(plan, role)}.model.path"
    return not describe_reward_model(directory, key=key, trust_remote_code=trust).is_value_model


def _scores(plan: RunPlan, role: RoleSpec, setup: RewardModelRole) -> Iterator[Problem]:
    config, section = plan.config, _section(plan, role)
    found = reward_model_input(setup.reward.model, setup.policy, key=f"{section}.model.path")
    model = found.model
    if setup.reward.process and not found.takes_tokens:
        yield ConfigError(
            f"{section}.process=true needs scores per token of the policy, but the model in {model.directory} has a"
            " tokenizer of its own.",
            remedy=f"Leave {section}.process out: the model then scores whole responses.",
        )
    if not model.is_value_model:
        yield from _runs_whole(section, setup.training, model)
        asked = config.roles[role.name].engine if role.name in config.roles else config.reward.engine
        if asked is not TrainingEngine.auto and TRAINING_ENGINES[asked].runs_on_several_devices:
            yield Advice(
                f"{section}.engine={asked.name} has no effect: transformers runs {model.directory} whole on each"
                " device.",
                remedy=f"Leave {section}.engine out.",
            )
    else:
        check_vocabulary(found.own_tokenizer, read_geometry(model.directory).vocab, model.directory)
    yield from _length(plan, section, found)
    two = len(model.labels) == 2
    score = f"log-odds of '{model.labels[1]}' against '{model.labels[0]}'" if two else "its one label"
    logger.info(
        "%s.model.path=%s reads=%s runs_on=%s score=%s",
        section, model.directory, "the policy's tokens" if found.takes_tokens else "text, in its own tokens",
        setup.training.engine.name if model.is_value_model else "transformers", score,
    )  # fmt: skip


def _section(plan: RunPlan, role: RoleSpec) -> str:
    return f"roles.{role.name}" if role.name in plan.config.roles else role.name


def _runs_whole(section: str, training: Training, model: RewardModelDescription) -> Iterator[ConfigError]:
    sizes = training.parallelism
    for axis, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("sequence", sizes.sequence)):
        if size > 1:
            yield ConfigError(
                f"{section}.parallelism.{axis}={size}, but no training engine knows the model in {model.directory}, so"
                " it runs whole on each device.",
                remedy="Leave the size out; the devices then divide the responses.",
            )


def _length(plan: RunPlan, section: str, found: RewardModelInput) -> Iterator[Problem]:
    """The longest input in tokens of the policy is known before the run; in the own tokens of the model it is not."""
    model, data, longest = found.model, plan.config.data, plan.sequence_tokens
    limit = model.max_positions if found.takes_tokens else longest_input(model, found.own_tokenizer)
    if limit is None or longest <= limit:
        return
    words = (
        f"data.max_prompt_tokens={data.max_prompt_tokens} and data.max_response_tokens={data.max_response_tokens} make"
        f" {longest} tokens; the model of {section} reads {limit}"
    )
    if found.takes_tokens:
        yield ConfigError(f"{words}.", remedy=f"Lower one of them, to {limit} together, or take another model.")
    else:
        yield Advice(
            f"{words} of its own tokens: a response that is longer in these ends the run.",
            remedy="Lower data.max_response_tokens if responses may become that long.",
        )
