"""Arguments of TRL that are translated together."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil

import yaml

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.config.other_names import other_defaults, other_names
from hybridflow.config.paths import user_path
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.other_systems.translation import (
    Given,
    Here,
    Missing,
    NotNeeded,
    Outcome,
    System,
    Translation,
    in_quotes,
    limit_of_both,
    translated,
)

TRL = "TRL"
TRL_TRAINERS: Mapping[str, str] = {
    "grpo": "grpo",
    "gspo": "gspo",
    "rloo": "rloo",
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "reward": "reward_model",
}
"""The commands of TRL, and those here."""

_SAMPLING = ("grpo", "gspo", "rloo")
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_TRACKERS = ("tensorboard", "wandb", "mlflow")
_REWARDS = {"accuracy_reward": "math", "think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}
_DEVICES = "num_processes"


def trl_translation(trainer: str, options: Mapping[str, str], launch: Mapping[str, str]) -> Translation:
    """Translates the arguments of `trl TRAINER` or of a script named after it. `launch` are those of accelerate."""
    names, given = other_names()[TRL], dict[str, str]()
    for option, value in options.items():
        name = option.replace("-", "_")
        is_off = name.startswith("no_") and name not in names and value == "true"
        given |= {name.removeprefix("no_"): "false"} if is_off else {name: value}
    if "config" in given:
        given = _file(given.pop("config")) | given
    devices = launch.get(_DEVICES) or launch.get("nproc_per_node") or given.pop(_DEVICES, None)
    if devices is None and "config_file" in launch and user_path(launch["config_file"]).is_file():
        devices = _file(launch["config_file"]).get(_DEVICES)
    defaults = {**other_defaults(TRL), **other_defaults(f"{TRL} {trainer}")}
    rules = {name: partial(rule, trainer) for name, rule in _RULES.items()}
    always = ["batch", "data", "evaluation", *(["loss", "reward", "kl"] if trainer in _SAMPLING else [])]
    rules["batch"] = partial(_batch, trainer, devices)
    start = {"algorithm": TRL_TRAINERS[trainer]} if trainer in _SAMPLING else {}
    found = translated(System(TRL, rules, always), given, defaults)
    return Translation({**start, **found.settings}, found.shown, found.not_needed, found.missing)


def _file(name: str) -> dict[str, str]:
    """The arguments in a file of TRL or accelerate."""
    try:
        content = yaml.safe_load(user_path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{name} cannot be read: {error}", remedy="Give the path of its YAML file.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} is not a mapping of arguments.", remedy="Give the path of its YAML file.")
    return {
        str(key): ",".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in content.items()
    }


def _batch(trainer: str, devices: str | None, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """TRL counts rows or completions per device and accumulation step; its steps are optimizer steps."""
    if devices is None:
        yield Missing(_DEVICES, "1 device is assumed; multiply data.batch_size and actor.minibatch_size by the number")
    num_devices = Given({_DEVICES: devices or "1"}, {}).count(_DEVICES)
    accumulated = source.count("gradient_accumulation_steps", 1)
    rows = source.count("per_device_train_batch_size", 8) * num_devices
    per_update, per_step, samples, iterations = rows * accumulated, rows * accumulated, 1.0, 1.0
    if trainer in _SAMPLING:
        samples, iterations = source.count("num_generations", 8), source.count("num_iterations", 1)
        per_step = source.number("generation_batch_size") or rows * source.count("steps_per_generation", accumulated)
    settings: dict[str, object] = {"trainer.devices": num_devices, "data.batch_size": int(per_step / samples)}
    if trainer in _SAMPLING:
        settings["actor.minibatch_size"] = int(per_update / samples)
        if per_update % samples or per_step % per_update:
            yield Missing(
                f"num_generations={samples:g}",
                f"optimizer steps of {per_update:g} completions divide a group; here they have whole groups",
            )
        if trainer == "rloo" and (per_step > per_update or iterations > 1):
            yield Missing("steps_per_generation", "in RLOO, TRL clips the ratios of responses, hybridflow of tokens")
    if source.number("max_steps", -1) > 0:
        updates = per_step / per_update * iterations
        settings["trainer.total_steps"] = ceil(source.number("max_steps") / updates)
    else:
        settings["trainer.epochs"] = source.text("num_train_epochs")
    yield Here(names, settings)


def _data(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    name, evaluates = source.text("dataset_name"), source.text("eval_strategy", "no") != "no"
    if not name:
        yield Missing("dataset_name", "the script reads its own data; set data.train_files and data.eval_files")
        return
    config = [f"config={source.text('dataset_config')}"] if source.has("dataset_config") else []
    settings: dict[str, object] = {
        "data.train_files": [_source(name, *config, split=source.text("dataset_train_split"))]
    }
    if evaluates:
        split = source.text("dataset_test_split", "test")
        settings["data.eval_files"] = [_source(name, *config, split=split)]
    yield Here(names, settings)


def _source(name: str, *parts: str, split: str) -> str:
    asked = "&".join([*parts, *([f"split={split}"] if split else [])])
    return f"{name}?{asked}" if asked else name


def _evaluation(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    every = source.text("eval_steps", "500") if source.text("eval_strategy", "no") == "steps" else "0"
    if source.text("eval_strategy") == "epoch":
        yield Missing("eval_strategy=epoch", "set trainer.eval_every to the steps of an epoch")
    yield Here(names, {"trainer.eval_every": every}, because="default eval_strategy=no")


def _length(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """Prompts are cut on their left; rows of demonstrations or pairs at their end."""
    if trainer in _SAMPLING:
        yield Here(names, {"data.max_prompt_tokens": source.text("max_prompt_length"), "data.truncation": "left"})
        return
    total = int(source.number("max_length", source.number("max_seq_length", 1024)))
    prompt = int(source.number("max_prompt_length", total // 2))
    if {"max_length", "max_seq_length"} & source.given.keys() and not source.has("max_prompt_length"):
        yield Missing(f"max_length={total}", limit_of_both(prompt, total - prompt))
    limits = {"data.max_prompt_tokens": prompt, "data.max_response_tokens": total - prompt}
    yield Here(names, {**limits, "data.truncation": "right"})


def _kl(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    beta = source.text("beta")
    if trainer not in _SAMPLING:
        yield Here(names, {"algorithm.preference.beta": beta})
    elif source.number("beta"):
        kind = ("reward", "k1") if trainer == "rloo" else ("loss", "k3")
        settings = {"placement": kind[0], "coefficient": beta, "estimator": kind[1]}
        yield Here(names, {f"algorithm.kl.{key}": value for key, value in settings.items()})
    else:
        yield Here(names)


def _loss(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    kind = source.text("loss_type")
    if trainer == "rloo":
        yield Here(names, {"algorithm.aggregation": "seq-mean-token-sum"}, because="RLOO of TRL")
    elif trainer in _SAMPLING and kind in _AGGREGATIONS:
        yield Here(names, {"algorithm.aggregation": _AGGREGATIONS[kind]})
    elif trainer in _SAMPLING and kind in ("cispo", "sapo"):
        yield Here(names, {"algorithm.policy_loss": kind})
    elif trainer == "dpo" and kind in PREFERENCE_LOSSES:
        yield Here(names, {"algorithm.preference.loss": kind})
    elif (trainer, kind) in (("sft", "nll"), ("kto", "kto")):
        yield Here(names)
    else:
        yield Missing(f"loss_type={kind}", "there is no such loss; hybridflow show --algorithms lists the losses")


def _clip(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    low = source.text("epsilon", "0.2")
    yield Here(names, {"algorithm.clip_low": low, "algorithm.clip_high": source.text("epsilon_high", low)})


def _lora(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    if not source.is_true("use_peft"):
        yield NotNeeded(names, "TRL uses it only with --use_peft")
        return
    settings: dict[str, object] = {
        "actor.lora.rank": source.text("lora_r", "16"),
        "actor.lora.alpha": source.text("lora_alpha", "32"),
    }
    if source.has("lora_target_modules") and source.text("lora_target_modules") != "all-linear":
        settings["actor.lora.targets"] = source.text("lora_target_modules").split(",")
    yield Here(names, settings)


def _reward(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    settings: dict[str, object] = {}
    if source.has("reward_funcs"):
        functions = source.text("reward_funcs").split(",")
        settings["reward.functions"] = [_REWARDS.get(name, name) for name in functions]
    if source.has("reward_model_name_or_path"):
        settings["reward.model.path"] = in_quotes(source.text("reward_model_name_or_path"))
    if not settings:
        yield Missing("reward_funcs", "the script has its own reward functions; set reward.functions=[FILE.py:NAME]")
    yield Here(names, settings)


def _warmup(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    share, steps = source.number("warmup_ratio"), source.number("max_steps", -1)
    if share and steps <= 0:
        yield Missing(
            f"warmup_ratio={share:g}",
            "set actor.optimizer.warmup_steps to this share of all optimizer steps, which depend on the data",
        )
        return
    yield Here(names, {"actor.optimizer.warmup_steps": ceil(share * steps)} if share else {})


def _trackers(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    wanted = source.text("report_to").split(",")
    yield Here(names, {"trainer.trackers": ["console", *(name for name in wanted if name in _TRACKERS), "jsonl"]})
    if unknown := [name for name in wanted if name not in (*_TRACKERS, "none", "all")]:
        yield NotNeeded([f"report_to={','.join(unknown)}"], f"trackers are console, jsonl, {', '.join(_TRACKERS)}")


_RULES = {
    "data": _data,
    "evaluation": _evaluation,
    "length": _length,
    "kl": _kl,
    "loss": _loss,
    "clip": _clip,
    "lora": _lora,
    "reward": _reward,
    "warmup": _warmup,
    "trackers": _trackers,
}
