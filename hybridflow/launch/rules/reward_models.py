"""Rules for frozen reward models: the head, the tokenizer, and the longest input."""

import logging

from hybridflow.config.derived import max_sequence_tokens
from hybridflow.config.experiment import Experiment
from hybridflow.config.reward import Reward
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import RoleSpec, policy_model
from hybridflow.models.classification import RewardModelDescription, longest_input
from hybridflow.models.geometry import read_geometry
from hybridflow.models.tokenizers import check_vocabulary
from hybridflow.workers.reward_model import RewardModelInput, RewardModelWorker, reward_model_input

logger = logging.getLogger(__name__)


def is_served(spec: RoleSpec) -> bool:
    """The role is a frozen reward model."""
    return spec.worker_class is RewardModelWorker


def check_reward_model(config: Experiment, spec: RoleSpec) -> RewardModelDescription:
    """The role's model; raises `ConfigError` if it cannot score the policy's responses as configured."""
    reward, training = spec.kwargs["reward"], spec.training
    assert isinstance(reward, Reward) and training is not None, f"{spec.name} is no reward model"
    section = f"roles.{spec.name}" if spec.name in config.roles else spec.name
    source = reward_model_input(reward.model, policy_model(config), key=f"{section}.model.path")
    model = source.model
    if reward.process and not source.takes_tokens:
        raise ConfigError(
            f"{section}.process=true, but the model in {model.directory} does not read the policy's tokens, so it"
            " has no scores for them.",
            remedy=f"Leave {section}.process out: it then scores whole responses.",
        )
    if not model.is_value_model:
        _check_whole(section, training, model)
        asked = config.roles[spec.name].engine if spec.name in config.roles else config.reward.engine
        if asked is not TrainingEngine.auto and TRAINING_ENGINES[asked].runs_on_several_devices:
            logger.warning(
                "%s.engine=%s has no effect: %s runs unsharded on each device", section, asked.name, model.directory
            )
    else:
        check_vocabulary(source.own_tokenizer, read_geometry(model.directory).vocab, model.directory)
    _check_length(config, section, source)
    words = (
        f"log-odds of '{model.labels[1]}' against '{model.labels[0]}'" if len(model.labels) == 2 else "its one label"
    )
    logger.info(
        "%s.model.path=%s reads=%s runs_on=%s score=%s",
        section, model.directory, "the policy's tokens" if source.takes_tokens else "text, in its own tokens",
        training.engine.name if model.is_value_model else "transformers", words,
    )  # fmt: skip
    return model


def _check_whole(section: str, training: Training, model: RewardModelDescription) -> None:
    sizes = training.parallelism
    for axis, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("sequence", sizes.sequence)):
        if size > 1:
            raise ConfigError(
                f"{section}.parallelism.{axis}={size}: training engines do not support the model in"
                f" {model.directory}, so it runs unsharded on each device.",
                remedy="Leave the size out; its devices then share the responses.",
            )


def _check_length(config: Experiment, section: str, source: RewardModelInput) -> None:
    """The longest input in the policy's tokens is known before the run; in the model's own tokens it is not."""
    model = source.model
    limit = model.max_positions if source.takes_tokens else longest_input(model, source.own_tokenizer)
    longest = max_sequence_tokens(config)
    if limit is None or longest <= limit:
        return
    found = (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
        f"{config.data.max_response_tokens} make {longest} tokens; the model of {section} reads {limit}"
    )
    if source.takes_tokens:
        raise ConfigError(f"{found}.", remedy=f"Lower one of them, to {limit} together, or take another model.")
    logger.warning("%s of its own: a response that is longer in these ends the run", found)
