"""Rules on models and rewards: usable models, reward functions that can be found and given their columns."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import torch

from hybridflow.config.choices import is_own
from hybridflow.config.experiment import Experiment
from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.config.rollout import Sampling
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.dataflows.roles import Scorer
from hybridflow.engines.rollout.custom import custom_engine
from hybridflow.engines.rollout.stop_strings import check_reads_text
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.errors import Advice, ConfigError, EngineError, HybridflowError, Problem, Problems
from hybridflow.launch.plan.data import TRAIN_FILES, RunData
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, CRITIC, RoleSpec, is_wanted
from hybridflow.models.adapters.lora import chosen_targets
from hybridflow.models.classification import RewardModelDescription, describe_reward_model, longest_input
from hybridflow.models.loading import torch_dtype
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.skeleton import causal_lm_skeleton
from hybridflow.models.tokenizers import check_vocabulary, eos_ids, load_tokenizer
from hybridflow.optional import check_installed
from hybridflow.rewards.resolve import check_settings, resolve_functions
from hybridflow.rewards.scorer import RewardScorer
from hybridflow.workers.critic import CriticRole
from hybridflow.workers.reward_model import RewardModelInput, RewardModelRole, reward_model_input

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def per_role(rule: Callable[[RunPlan, RoleSpec], Iterable[Problem]]) -> Callable[[RunPlan], list[Problem]]:
    """Makes a rule on a role a rule on the plan; an error that it raises for one role hides none of another."""

    @wraps(rule)
    def of_plan(plan: RunPlan) -> list[Problem]:
        problems = Problems(collects=True)
        for role in plan.roles:
            problems.check([rule], plan, role)
        return [*problems.found, *problems.warnings]

    return of_plan


@per_role
def directory_problems(plan: RunPlan, role: RoleSpec) -> Iterator[Problem]:
    """Configurations from which transformers cannot build a model, quantized weights, and unused layers.

    The modules are built without memory, so this takes no longer for a large model. Frozen reward models have rules of
    their own.
    """
    model, of_paths = role.model, {str(model.path): other.name for other, model in _language_models(plan)}
    if model is None or role.name not in of_paths.values():
        return  # each model is built once
    directory, layers = plan.models.directory(role.name), plan.models.geometry(role.name).layers
    method = read_json_object(directory / "config.json").get("quantization_config")
    if method is not None:
        name = method.get("quant_method") if isinstance(method, dict) else None
        yield EngineError(
            f"The weights in {directory} are quantized ({name or 'quantization_config in its config.json'}).",
            remedy="Use the model in float32, bfloat16 or float16; quantized weights cannot be trained or sharded.",
        )
        return
    causal_lm_skeleton(directory, dtype=torch_dtype(model.dtype), trust_remote_code=model.trust_remote_code)
    yield from _unused_layers(directory, layers)


def tokenizer_problems(plan: RunPlan) -> Iterator[Problem]:
    """Models that do not accept the policy's tokens, or sequences as long as the run's."""
    config, longest, problems, tokenizer = plan.config, plan.sequence_tokens, Problems(collects=True), None
    load = cache(lambda directory, pad_token: load_tokenizer(directory, pad_token=pad_token))
    with problems.caught():
        tokenizer = load(plan.models.tokenizer_directory(ACTOR, plan.policy), plan.policy.pad_token)
        eos_ids(tokenizer, plan.models.directory(ACTOR))
    for role, model in _language_models(plan):
        with problems.caught():
            load(plan.models.tokenizer_directory(role.name, model), model.pad_token)
        with problems.caught():
            geometry, directory = plan.models.geometry(role.name), plan.models.directory(role.name)
            if geometry.max_positions and longest > geometry.max_positions:
                yield ConfigError(
                    f"data.max_prompt_tokens={config.data.max_prompt_tokens} and data.max_response_tokens="
                    f"{config.data.max_response_tokens} make {longest} tokens; the model in {directory} reads"
                    f" {geometry.max_positions}.",
                    remedy=f"Lower one of them, to {geometry.max_positions} together.",
                )
            if tokenizer is not None:
                check_vocabulary(tokenizer, geometry.vocab, directory)
    yield from problems.found


def stop_problems(plan: RunPlan) -> Iterator[Problem]:
    """Stop strings for a tokenizer that cannot find them, and stop tokens that the policy does not have."""
    if not plan.generates:
        return
    vocab = plan.models.geometry(ACTOR).vocab
    for name in ("sampling", "eval_sampling"):
        sampling: Sampling = vars(plan.config.rollout)[name]
        if sampling.stop:
            tokenizer = load_tokenizer(
                plan.models.tokenizer_directory(ACTOR, plan.policy), pad_token=plan.policy.pad_token
            )
            check_reads_text(tokenizer, key=f"rollout.{name}.stop")
        if beyond := [token for token in sampling.stop_token_ids if token >= vocab]:
            yield ConfigError(
                f"rollout.{name}.stop_token_ids contains {beyond[0]}, but the policy's token ids are 0 to {vocab - 1}.",
                remedy=f"Use ids of its tokenizer, or give the text in rollout.{name}.stop.",
            )


def _language_models(plan: RunPlan) -> Iterator[tuple[RoleSpec, Model]]:
    """The roles with a model, except frozen reward models."""
    for role in plan.roles:
        if role.model is not None and not isinstance(role.arguments, RewardModelRole):
            yield role, role.model


@per_role
def adapter_problems(plan: RunPlan, role: RoleSpec) -> Iterable[Problem]:
    """LoRA without its package, or without layers to adapt."""
    if role.model is not None and role.training is not None and role.training.lora.rank:
        check_installed("peft")
        if targets := role.training.lora.targets:
            directory, trust = plan.models.directory(role.name), role.model.trust_remote_code
            model = causal_lm_skeleton(directory, dtype=torch.bfloat16, trust_remote_code=trust)
            section = CRITIC if isinstance(role.arguments, CriticRole) else ACTOR
            chosen_targets(model, targets, key=f"{section}.lora.targets")
    return []


def rollout_problems(plan: RunPlan) -> Iterable[Problem]:
    """Rollout engines that are not installed, do not support the policy on this device, or lack a method."""
    rollout = plan.config.rollout
    if rollout.engine is not None and plan.generates:
        if is_own(rollout.engine):
            custom_engine(rollout.engine)
        engine = rollout_traits(rollout.engine)
        engine.check_installed()  # importing it takes seconds, and is left to the engine
        engine.check_model(plan.models.directory(ACTOR), plan.device, rollout.parallelism.pipeline)
    return []


def _unused_layers(directory: Path, layers: int) -> Iterator[Advice]:
    """Layers after the last one, which may predict further tokens (MTP)."""
    if not any(directory.glob("*.safetensors")):
        return
    numbers = {int(found[1]) for name in saved_shapes(directory) if (found := _LAYER.search(name))}
    if beyond := sorted(number for number in numbers if number >= layers):
        yield Advice(
            f"model={directory}: the weights have layers {beyond[0]} to {beyond[-1]}, and its config.json says"
            f" num_hidden_layers={layers}: they are not used.",
            remedy="This is normal for multi-token prediction layers; otherwise correct config.json.",
        )


def reward_problems(plan: RunPlan, data: RunData | None) -> Iterable[Problem]:
    """Reward functions and servers that are not found, or that need columns missing from the data (if it was read)."""
    problems, rewards = Problems(collects=True), [role.reward for role in plan.roles if role.reward is not None]
    for reward in rewards:
        with problems.caught():
            if reward.functions or reward.model.path is None:
                scorer = RewardScorer(reward, problems)
                known = len(problems.found)
                for setting, columns in ({} if data is None else data.scored_columns).items():
                    if len(problems.found) == known:
                        _check_columns(scorer, setting, columns, plan.config, problems)
                scorer.check_servers(problems)
    check_settings(rewards, problems)
    return problems.found


def _check_columns(
    scorer: RewardScorer, setting: str, columns: list[str], config: Experiment, problems: Problems
) -> None:
    is_held_out = setting != TRAIN_FILES
    files = ",".join(config.data.eval_files if is_held_out else config.data.train_files)
    remedy = f" Without evaluation: {setting}=[]." if is_held_out and config.trainer.total_steps else ""
    scorer.check_columns(columns, problems, data=f"{setting}=[{files}]", remedy=remedy)


def reward_function_problems(config: Experiment, dataflow: type[Dataflow] | None) -> list[HybridflowError]:
    """Reward functions that are not found; without a dataflow, of all sections that name some."""
    problems, names = Problems(collects=True), ["reward", *config.roles]
    if dataflow is not None:
        needs = role_needs(dataflow).items()
        names = [n for n, need in needs if need.kind is Scorer and is_wanted(config, dataflow, None, n, need)]
    for name in names:
        functions = config.roles[name].functions if name in config.roles else config.reward.functions
        if functions:
            resolve_functions(replace(config.reward, functions=functions), problems)
    return problems.found


@per_role
def reward_model_problems(plan: RunPlan, role: RoleSpec) -> Iterator[Problem]:
    """Frozen reward models without a head, or that do not accept the policy's tokens or the length of its responses."""
    if isinstance(role.arguments, RewardModelRole):
        yield from _scores(plan, role, role.arguments)


def runs_whole(plan: RunPlan, role: RoleSpec) -> bool:
    """Whether a role is a reward model that transformers runs whole on each device, whatever its family."""
    if not isinstance(role.arguments, RewardModelRole):
        return False
    trust = role.arguments.reward.model.trust_remote_code
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
        check_vocabulary(found.own_tokenizer, plan.models.geometry(role.name).vocab, model.directory)
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
                remedy="Leave the size out; the responses are then divided over the devices.",
            )


def _length(plan: RunPlan, section: str, found: RewardModelInput) -> Iterator[Problem]:
    """The longest input is known before the run in tokens of the policy, but not in the model's own tokens."""
    model, data, longest = found.model, plan.config.data, plan.sequence_tokens
    limit = model.max_positions if found.takes_tokens else longest_input(model, found.own_tokenizer)
    if limit is None or longest <= limit:
        return
    words = (
        f"data.max_prompt_tokens={data.max_prompt_tokens} and data.max_response_tokens={data.max_response_tokens} make"
        f" {longest} tokens; the model of {section} reads {limit}"
    )
    if found.takes_tokens:
        yield ConfigError(f"{words}.", remedy=f"Lower one of them, to {limit} together, or use another model.")
    else:
        yield Advice(
            f"{words} of its own tokens; a response with more of these ends the run.",
            remedy="Lower data.max_response_tokens if responses may become that long.",
        )
