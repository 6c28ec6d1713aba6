"""What can be known to fail before anything starts: packages, models, tokenizers, reward functions."""

import json
from collections.abc import Collection
from dataclasses import replace

from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.engines.rollout.vllm.limits import unsupported_reason
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import ConfigError
from hybridflow.launch.assemble import device_name
from hybridflow.launch.roles import resolved_model
from hybridflow.models.geometry import read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import check_vocabulary, eos_ids, load_tokenizer
from hybridflow.optional import check_installed
from hybridflow.rewards.scorer import RewardScorer


def check_run(config: Experiment) -> None:
    """Raises the error that the first step would meet."""
    _check_model(config)
    if config.rollout.engine is RolloutKind.vllm:
        _check_vllm(config)


def _check_model(config: Experiment) -> None:
    model = resolved_model(config, config.actor.model)
    directory = resolve_model_path(str(model.path))
    tokenizer = load_tokenizer(tokenizer_directory(model), pad_token=model.pad_token)
    geometry = read_geometry(directory)
    check_vocabulary(tokenizer, geometry.vocab, directory)
    eos_ids(tokenizer, directory)
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    if geometry.max_positions and longest > geometry.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
            f"{config.data.max_response_tokens} make {longest} tokens; the model reads {geometry.max_positions}.",
            remedy=f"Lower one of them, to {geometry.max_positions} together.",
        )


def check_rewards(config: Experiment, columns: Collection[str]) -> None:
    """Finds the reward functions, and the data's columns that they ask for."""
    if config.dataflow != "sft":
        RewardScorer(config.reward).check_columns(columns)
    for role in config.roles.values():
        if role.functions:
            RewardScorer(replace(config.reward, functions=role.functions, weights=[])).check_columns(columns)


def _check_vllm(config: Experiment) -> None:
    check_installed("vllm")  # importing it takes seconds, and is the rollout engine's to do, in its own way
    directory = resolve_model_path(str(resolved_model(config, config.actor.model).path))
    reason = unsupported_reason(json.loads((directory / "config.json").read_text()), device_name(config))
    if reason:
        raise ConfigError(f"rollout.engine=vllm: {reason}", remedy="Use rollout.engine=transformers for this model.")
