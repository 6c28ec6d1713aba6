"""Numbers that follow from the configuration: pure arithmetic."""

from pathlib import Path

from hybridflow.config.experiment import Experiment
from hybridflow.config.model import Model
from hybridflow.config.training import Training


def num_devices(config: Experiment) -> int:
    """Devices of the whole run."""
    return config.trainer.devices * config.trainer.nodes


def pool_sizes(config: Experiment) -> dict[str, int]:
    """Devices of each pool; one pool with all of them where the configuration names none."""
    named = {name: pool.devices for name, pool in config.placement.pools.items()}
    return named or {"main": num_devices(config)}


def minibatch_prompts(config: Experiment, training: Training) -> int:
    """Prompts an optimizer step."""
    return training.minibatch_size or config.data.batch_size


def optimizer_steps_per_step(config: Experiment, training: Training) -> int:
    """Optimizer steps a training step."""
    return training.epochs * (config.data.batch_size // minibatch_prompts(config, training))


def total_optimizer_steps(config: Experiment, training: Training) -> int:
    """Optimizer steps of the whole run."""
    return config.trainer.total_steps * optimizer_steps_per_step(config, training)


def run_dir(config: Experiment) -> Path:
    """The directory for everything the run writes."""
    return Path(config.trainer.run_dir or f"runs/{config.trainer.experiment}").expanduser()


def model_of(config: Experiment, model: Model) -> Model:
    """The model of a role: its own, or the run's where it names none."""
    return model if model.path is not None else config.model


def max_sequence_tokens(config: Experiment) -> int:
    """Longest prompt and response together."""
    return config.data.max_prompt_tokens + config.data.max_response_tokens
