"""What can be known to fail before anything starts: devices, ports, packages, models, tokenizers, reward functions."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config.algorithm import Algorithm
from hybridflow.config.derived import max_sequence_tokens, optimizer_steps_per_step, pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.config.reward import Reward
from hybridflow.config.training import Lora
from hybridflow.dataflows.interface import Dataflow, learns_from_preferences, learns_from_samples
from hybridflow.engines.rollout.traits import ROLLOUT_ENGINES
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import ACTOR, RoleSpec, policy_model
from hybridflow.launch.rules.device_memory import least_gpus
from hybridflow.launch.rules.layouts import layout_errors
from hybridflow.launch.rules.memory_estimate import check_memory
from hybridflow.launch.rules.model_directories import check_models
from hybridflow.launch.rules.reward_models import check_reward_model, is_served
from hybridflow.models.adapters.lora import chosen_targets
from hybridflow.models.geometry import read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.skeleton import causal_lm_skeleton
from hybridflow.models.tokenizers import check_vocabulary, eos_ids, load_tokenizer
from hybridflow.optional import check_installed
from hybridflow.rewards.resolve import check_settings
from hybridflow.rewards.scorer import RewardScorer
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.named_functions import PREFERENCE_OFFERS, NamedFunction, estimator, policy_loss, preference_loss

logger = logging.getLogger(__name__)

_TRACKER_PACKAGES = ("wandb", "mlflow")


def check_run(config: Experiment, specs: Sequence[RoleSpec], device: str = "cpu") -> None:
    """Raises the error that the start of the roles, or the first step, would meet."""
    _warn_of_idle_pools(config, specs)
    _check_packages(config, specs)
    policy = policy_model(config)
    directories = {spec.name: _directory(config, spec) for spec in specs if spec.model is not None}
    check_models({directories[spec.name]: spec.model for spec in specs if spec.model and not is_served(spec)})
    tokenizer = load_tokenizer(tokenizer_directory(policy), pad_token=policy.pad_token)
    reward_models = {spec.name: check_reward_model(config, spec) for spec in specs if is_served(spec)}
    for spec in specs:
        if spec.model is not None and spec.name not in reward_models:
            load_tokenizer(tokenizer_directory(spec.model), pad_token=spec.model.pad_token)
            _check_fit(config, tokenizer, directories[spec.name])
    directory = resolve_model_path(str(policy.path))
    eos_ids(tokenizer, directory)
    whole = [name for name, model in reward_models.items() if not model.is_value_model]
    divided = [spec for spec in specs if spec.model is not None and spec.name not in whole]
    for error in layout_errors(config, divided, {spec.name: read_geometry(directories[spec.name]) for spec in divided}):
        raise error
    for spec in specs:
        if spec.training is not None and spec.training.lora.rank:
            _check_adapter(spec, spec.training.lora, directories[spec.name])
    if config.rollout.engine is not None and any(spec.generation_mesh is not None for spec in specs):
        rollout = ROLLOUT_ENGINES[config.rollout.engine]
        rollout.check_installed()
        rollout.check_model(directory, device, config.rollout.parallelism.pipeline)
    if device == "cuda":
        check_memory(config, specs, least_gpus(config), whole=whole)


def _check_packages(config: Experiment, specs: Sequence[RoleSpec]) -> None:
    """What trackers and engines import is installed."""
    for name in config.trainer.trackers:
        if name in _TRACKER_PACKAGES:
            check_installed(name)
    for spec in specs:
        if spec.training is not None:
            TRAINING_ENGINES[spec.training.engine].check_installed()


def check_methods(config: Experiment, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> None:
    """Estimator and loss, or the loss of preferences, are found and can be called with what they name."""
    if learns_from_preferences(dataflow):
        preference_loss(config.algorithm, PREFERENCE_OFFERS[dataflow.data])
    if not learns_from_samples(dataflow):
        return
    for spec in specs:
        algorithm = spec.kwargs.get("algorithm")
        if spec.worker_class in (ActorWorker, CriticWorker) and isinstance(algorithm, Algorithm):
            loss, bound = policy_loss(algorithm), estimator(algorithm)
            if spec.name == ACTOR:
                _warn_of_unbounded_steps(config, loss)
            if bound.name == "gdpo" and "reward" not in config.roles:
                _check_weights(config, bound.settings.get("weights"))


def _warn_of_unbounded_steps(config: Experiment, loss: NamedFunction) -> None:
    """A loss that does not look at the policy of the samples is right for the first optimizer step of a batch."""
    steps = optimizer_steps_per_step(config, config.actor)
    if steps > 1 and "old_logprobs" not in loss.parameters:
        logger.warning(
            "algorithm.policy_loss=%s does not look at the policy that drew the samples, and a batch has %d optimizer"
            " steps: nothing bounds how far the later ones take it; use actor.minibatch_size=null and actor.epochs=1",
            loss.name, steps,
        )  # fmt: skip


def _check_weights(config: Experiment, weights: object) -> None:
    """GDPO weighs each function, and the reward model after them."""
    rewards = [*config.reward.functions, *([] if config.reward.model.path is None else ["the reward model"])]
    if config.reward.weights and not weights:
        logger.warning(
            "reward.weights=%s is without effect on advantages: algorithm.advantage=gdpo weighs each reward by"
            " algorithm.advantage_settings.weights, 1 each where there are none",
            config.reward.weights,
        )
    if isinstance(weights, list) and weights and len(weights) != len(rewards):
        raise ConfigError(
            f"algorithm.advantage_settings.weights={weights} for {len(rewards)} rewards: {', '.join(rewards)}.",
            remedy="Give one weight per reward, in this order, or none for 1 each.",
        )


def _warn_of_idle_pools(config: Experiment, specs: Sequence[RoleSpec]) -> None:
    for pool in sorted(set(pool_sizes(config)) - {spec.pool for spec in specs}):
        logger.warning(
            "placement.pools.%s.devices=%d: no role lives there, so its devices do nothing; place one with"
            " placement.roles.<role>=%s, or leave the pool out.",
            pool, pool_sizes(config)[pool], pool,
        )  # fmt: skip


def check_rewards(specs: Sequence[RoleSpec], columns: Collection[str] | None) -> None:
    """Finds the reward functions, the data's columns (where they are known) that they ask for, and the servers."""
    rewards = [reward for spec in specs if isinstance(reward := spec.kwargs.get("reward"), Reward)]
    for reward in rewards:
        if reward.functions or reward.model.path is None:
            scorer = RewardScorer(reward)
            if columns is not None:
                scorer.check_columns(columns)
            scorer.check_servers()
    check_settings(rewards)


def _directory(config: Experiment, spec: RoleSpec) -> Path:
    """Where the role's model is; an error names the setting that says so."""
    assert spec.model is not None, f"{spec.name} runs no model"
    settings = {"actor": config.actor.model, "critic": config.critic.model, "reward": config.reward.model}
    settings |= {f"roles.{name}": role.model for name, role in config.roles.items()}
    section = ACTOR if spec.name == "reward_model" else spec.name
    own = [key for key in (section, f"roles.{spec.name}") if key in settings and settings[key].path is not None]
    return resolve_model_path(str(spec.model.path), key=f"{own[0]}.model.path" if own else "model.path")


def _check_fit(config: Experiment, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """The model reads what the policy's tokenizer writes, and as much of it as the run asks for."""
    geometry = read_geometry(directory)
    check_vocabulary(tokenizer, geometry.vocab, directory)
    longest = max_sequence_tokens(config)
    if geometry.max_positions and longest > geometry.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
            f"{config.data.max_response_tokens} make {longest} tokens; the model in {directory} reads"
            f" {geometry.max_positions}.",
            remedy=f"Lower one of them, to {geometry.max_positions} together.",
        )


def _check_adapter(spec: RoleSpec, lora: Lora, directory: Path) -> None:
    """The package that adds it is there, and the model has the layers that it is for."""
    check_installed("peft")
    if lora.targets:
        trust = spec.model is not None and spec.model.trust_remote_code
        model = causal_lm_skeleton(directory, dtype=torch.bfloat16, trust_remote_code=trust)
        chosen_targets(model, lora.targets, key=f"{spec.name}.lora.targets")
