"""Rules on models: they can be built from their directories, read the policy's tokens, and have adapters' layers."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from hybridflow.config.json_text import read_json_object
from hybridflow.engines.rollout.traits import ROLLOUT_ENGINES
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import Advice, ConfigError, EngineError, Problem
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR
from hybridflow.launch.plan.setups import RewardModelRole
from hybridflow.models.adapters.lora import chosen_targets
from hybridflow.models.loading import torch_dtype
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.skeleton import causal_lm_skeleton
from hybridflow.models.tokenizers import check_vocabulary, eos_ids, load_tokenizer
from hybridflow.optional import check_installed

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def directory_problems(plan: RunPlan) -> Iterator[Problem]:
    """Descriptions from which transformers cannot build a model, quantized weights, and layers that are never read.

    The modules are built without memory, so this takes no longer for a large model. Frozen reward models have rules of
    their own.
    """
    models = {
        plan.models.directory(role.name): role
        for role in plan.roles
        if role.model is not None and not isinstance(role.setup, RewardModelRole)
    }
    for directory, role in models.items():
        assert role.model is not None, f"{role.name} runs no model"
        layers = plan.models.geometry(role.name).layers
        method = read_json_object(directory / "config.json").get("quantization_config")
        if method is not None:
            name = method.get("quant_method") if isinstance(method, dict) else None
            yield EngineError(
                f"The weights in {directory} are quantized ({name or 'quantization_config in its config.json'}).",
                remedy="Use the model in float32, bfloat16 or float16; quantized weights cannot be trained or sharded.",
            )
            continue
        trust = role.model.trust_remote_code
        causal_lm_skeleton(directory, dtype=torch_dtype(role.model.dtype), trust_remote_code=trust)
        yield from _unused_layers(directory, layers)


def tokenizer_problems(plan: RunPlan) -> Iterator[Problem]:
    """The models read what the policy's tokenizer writes, and as many tokens as the run asks for."""
    config, longest = plan.config, plan.sequence_tokens
    tokenizer = load_tokenizer(tokenizer_directory(plan.policy), pad_token=plan.policy.pad_token)
    eos_ids(tokenizer, plan.models.directory(ACTOR))
    for role in plan.roles:
        if role.model is None or isinstance(role.setup, RewardModelRole):
            continue
        load_tokenizer(tokenizer_directory(role.model), pad_token=role.model.pad_token)
        geometry, directory = plan.models.geometry(role.name), plan.models.directory(role.name)
        check_vocabulary(tokenizer, geometry.vocab, directory)
        if geometry.max_positions and longest > geometry.max_positions:
            yield ConfigError(
                f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
                f"{config.data.max_response_tokens} make {longest} tokens; the model in {directory} reads"
                f" {geometry.max_positions}.",
                remedy=f"Lower one of them, to {geometry.max_positions} together.",
            )


def adapter_problems(plan: RunPlan) -> Iterable[Problem]:
    """Low-rank adapters have the package that adds them, and layers to adapt."""
    for role in plan.roles:
        if role.model is None or role.training is None or not role.training.lora.rank:
            continue
        check_installed("peft")
        if targets := role.training.lora.targets:
            directory, trust = plan.models.directory(role.name), role.model.trust_remote_code
            model = causal_lm_skeleton(directory, dtype=torch.bfloat16, trust_remote_code=trust)
            chosen_targets(model, targets, key=f"{role.name}.lora.targets")
    return []


def rollout_problems(plan: RunPlan) -> Iterable[Problem]:
    """The rollout engine is installed, and runs the policy on this device."""
    rollout = plan.config.rollout
    if rollout.engine is not None and plan.generates:
        engine = ROLLOUT_ENGINES[rollout.engine]
        engine.check_installed()  # importing it takes seconds, and is left to the engine
        engine.check_model(plan.models.directory(ACTOR), plan.device, rollout.parallelism.pipeline)
    return []


def _unused_layers(directory: Path, layers: int) -> Iterator[Advice]:
    """Layers after the last one may predict further tokens (MTP)."""
    if not any(directory.glob("*.safetensors")):
        return
    numbers = {int(found[1]) for name in saved_shapes(directory) if (found := _LAYER.search(name))}
    if beyond := sorted(number for number in numbers if number >= layers):
        yield Advice(
            f"model={directory}: the weights have layers {beyond[0]} to {beyond[-1]}, and its config.json says"
            f" num_hidden_layers={layers}: they are not used.",
            remedy="This is normal for layers that predict further tokens; else correct config.json.",
        )
