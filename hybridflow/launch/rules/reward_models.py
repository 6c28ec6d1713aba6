"""Whether a reward model can judge what the policy writes: its head, its tokens, its positions."""

import logging

from hybridflow.config.derived import max_sequence_tokens
from hybridflow.config.experiment import Experiment
from hybridflow.config.reward import Reward
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import RoleSpec, policy_model
from hybridflow.models.classification import JudgingModel, longest_input
from hybridflow.models.geometry import read_geometry
from hybridflow.models.tokenizers import check_vocabulary
from hybridflow.workers.reward_model import Reading, RewardModelWorker, reading_of

logger = logging.getLogger(__name__)


def is_served(spec: RoleSpec) -> bool:
    """The role is a frozen reward model."""
    return spec.worker_class is RewardModelWorker


def check_judge(config: Experiment, spec: RoleSpec) -> Reading:
    """Raises `ConfigError` for a model that cannot judge as it is asked to; says how it will read the policy."""
    reward, training = spec.kwargs["reward"], spec.training
    assert isinstance(reward, Reward) and training is not None, f"{spec.name} is no reward model"
    section = f"roles.{spec.name}" if spec.name in config.roles else spec.name
    reading = reading_of(reward.model, policy_model(config), key=f"{section}.model.path")
    judge = reading.judge
    if reward.process and not reading.shows_tokens:
        raise ConfigError(
            f"{section}.process=true, but the model in {judge.directory} does not read the policy's tokens, so that its"
            " scores are of others.",
            remedy=f"Leave {section}.process out: it then judges whole responses.",
        )
    if not judge.is_value_model:
        _check_whole(section, training, judge)
        asked = config.roles[spec.name].engine if spec.name in config.roles else config.reward.engine
        if asked is not TrainingEngine.auto and TRAINING_ENGINES[asked].runs_on_several_devices:
            logger.warning(
                "%s.engine=%s is without effect: %s runs whole on each device", section, asked.name, judge.directory
            )
    else:
        check_vocabulary(reading.reader, read_geometry(judge.directory).vocab, judge.directory)
    _check_length(config, section, reading)
    words = (
        f"log-odds of '{judge.labels[1]}' against '{judge.labels[0]}'" if len(judge.labels) == 2 else "its one label"
    )
    logger.info(
        "%s.model.path=%s reads=%s runs_on=%s score=%s",
        section, judge.directory, "the policy's tokens" if reading.shows_tokens else "text, in its own tokens",
        training.engine.name if judge.is_value_model else "transformers", words,
    )  # fmt: skip
    return reading


def _check_whole(section: str, training: Training, judge: JudgingModel) -> None:
    sizes = training.parallelism
    for axis, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("sequence", sizes.sequence)):
        if size > 1:
            raise ConfigError(
                f"{section}.parallelism.{axis}={size}: the model in {judge.directory} is none that training engines"
                " know, and runs whole on each device.",
                remedy="Leave the size out; its devices then divide the responses.",
            )


def _check_length(config: Experiment, section: str, reading: Reading) -> None:
    """Of the policy's tokens the most are known; of its own, only while it reads."""
    judge = reading.judge
    limit = judge.max_positions if reading.shows_tokens else longest_input(judge, reading.reader)
    longest = max_sequence_tokens(config)
    if limit is None or longest <= limit:
        return
    told = (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
        f"{config.data.max_response_tokens} make {longest} tokens; the model of {section} reads {limit}"
    )
    if reading.shows_tokens:
        raise ConfigError(f"{told}.", remedy=f"Lower one of them, to {limit} together, or take another model.")
    logger.warning("%s of its own: a response that is longer in these ends the run", told)
