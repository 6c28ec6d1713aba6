"""Settings of verl that are translated together."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from hybridflow.config.other_names import VERL, other_defaults, verl_key, verl_name
from hybridflow.launch.compose.other_systems.translation import (
    NO_CRITIC,
    Given,
    Here,
    Missing,
    NotNeeded,
    Outcome,
    System,
    Translation,
    as_list,
    translated_without,
)
from hybridflow.launch.compose.presets import preset_name, presets

_ESTIMATOR, _FILTER = "algorithm.adv_estimator", "algorithm.filter_groups"
_TRACKERS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)
_DEFAULT_FUNCTION = "gsm8k"
_KWARGS = "custom_reward_function.reward_kwargs"
_OF_TRAINING = ("trainer.test_freq", "trainer.total_epochs", "trainer.total_training_steps")
_MEGATRON = re.compile(r"(actor|critic)\.megatron\.")


def verl_translation(given: Mapping[str, str]) -> Translation:
    """Translates overrides of `verl.trainer.main_ppo`, by their keys."""
    source = {verl_name(key): value for key, value in given.items()}
    if any(_MEGATRON.match(name) for name in source):
        source = {"model_engine": "megatron"} | source
    if source.get("data.filter_overlong_prompts", "").lower() == "true":
        source.pop("data.truncation", None)  # verl leaves rows out before it would cut them
    defaults = other_defaults(VERL)
    unused: dict[str, list[str]] = {}
    if source.get("trainer.val_only", "").lower() == "true":
        unused["trainer.val_only=True only evaluates, before the first step"] = [*_OF_TRAINING]
    if _estimator_name(Given(source, defaults)) != "ppo":
        unused[NO_CRITIC] = [name for name in {**source, **defaults} if name.startswith("critic.")]
    return translated_without(unused, _SYSTEM, source, defaults)


def _estimator_name(source: Given) -> str:
    return preset_name(source.text(_ESTIMATOR).lower().removesuffix("_vectorized"))


def _estimator(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """The preset of an estimator; with groups that are filtered, the dataflow of DAPO."""
    name = _estimator_name(source)
    if name not in presets():
        yield Missing(f"{_ESTIMATOR}={name}", f"choose from: {', '.join(presets())}")
        return
    settings: dict[str, object] = {"algorithm": name}
    if name == "grpo" and not source.is_true("algorithm.norm_adv_by_std_in_grpo", "true"):
        settings["algorithm.advantage"] = "dr_grpo"
    if source.is_true(f"{_FILTER}.enable"):
        batches = int(source.number(f"{_FILTER}.max_num_gen_batches"))
        if batches <= 0:
            yield Missing(
                f"{_FILTER}.max_num_gen_batches={batches}",
                "a step draws a limited number of batches; set dataflow_settings.max_refills",
            )
        prompts, drawn = source.count("data.train_batch_size"), source.number("data.gen_batch_size")
        refills = math.ceil(batches * (drawn or prompts) / prompts) - 1  # which draw data.batch_size prompts each
        settings |= {"dataflow": "dapo", "dataflow_settings.max_refills": max(refills, 0)}
        settings |= {"dataflow_settings.overlong_buffer": 0.0} | dict(_punishment(source))
        yield from _metric(source)
    elif source.number("data.gen_batch_size") not in (0, source.number("data.train_batch_size")):
        yield Missing(
            f"data.gen_batch_size={source.text('data.gen_batch_size')}",
            "without filter_groups, verl's batches have this size; set data.batch_size",
        )
    yield Here(names, settings)


def _metric(source: Given) -> Iterator[Outcome]:
    """The scores of which filtered groups must have several; those of DAPO here are without its punishment."""
    name = f"{_FILTER}.metric"
    is_punished = any(source.is_true(f"{section}.enable") for section in _OVERLONG)
    is_sum = source.text(name) == "seq_reward" and is_punished
    if is_sum or (
        source.text(name) == "seq_final_reward" and (is_punished or source.is_true("algorithm.use_kl_in_reward"))
    ):
        yield Missing(f"{name}={source.text(name)}", "groups are compared by their scores, without penalties")
    elif source.has(name):
        yield NotNeeded([name], "groups are compared by their scores, without the punishment of long responses")


def _punishment(source: Given) -> Iterator[tuple[str, object]]:
    """The overlong punishment of the dataflow of DAPO, which does not change which groups are filtered."""
    for section in _OVERLONG:
        if source.is_true(f"{section}.enable"):
            share = source.number(f"{section}.len") / source.count("data.max_response_length", 512)
            yield "dataflow_settings.overlong_buffer", share
            yield "dataflow_settings.overlong_penalty", source.number(f"{section}.penalty_factor", 1)


def _kl(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    in_reward, in_loss = source.is_true("algorithm.use_kl_in_reward"), source.is_true("actor.use_kl_loss")
    offload = "ref.fsdp_config.param_offload"
    if in_reward and in_loss:
        yield Missing("actor.use_kl_loss=True", "the divergence is in the reward or in the loss, not in both")
        return
    if not (in_reward or in_loss):
        switches = ("algorithm.use_kl_in_reward", "actor.use_kl_loss")
        rest = [name for name in names if name not in switches]
        yield NotNeeded(rest, "verl uses it only with algorithm.use_kl_in_reward=True or actor.use_kl_loss=True")
        return
    coefficient, estimator = (
        ("algorithm.kl_ctrl.kl_coef", source.text("algorithm.kl_penalty", "kl"))
        if in_reward
        else ("actor.kl_loss_coef", source.text("actor.kl_loss_type", "low_var_kl"))
    )
    settings: dict[str, object] = {
        "algorithm.kl.placement": "reward" if in_reward else "loss",
        "algorithm.kl.coefficient": source.text(coefficient, "0.001"),
        "algorithm.kl.estimator": estimator,
    }
    if in_loss and estimator in ("kl", "k1"):
        settings["algorithm.kl.allow_k1_loss"] = True
    if in_reward and source.text("algorithm.kl_ctrl.type") == "adaptive":
        settings["algorithm.kl.target"] = source.text("algorithm.kl_ctrl.target_kl", "0.1")
        settings["algorithm.kl.horizon"] = source.text("algorithm.kl_ctrl.horizon", "10000")
    if source.is_true(offload):
        settings["roles.reference.offload_parameters"] = True
    yield Here(names, settings)


def _tokens(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """Microbatches in tokens: verl counts them so only with dynamic batch sizes, else in rows of maximum length."""
    role = "critic" if any(name.startswith("critic.") for name in names) else "actor"
    limit, rows = f"{role}.ppo_max_token_len_per_gpu", f"{role}.ppo_micro_batch_size"
    longest = source.number("data.max_prompt_length", 512) + source.number("data.max_response_length", 512)
    if source.is_true(f"{role}.use_dynamic_bsz", source.text("actor.use_dynamic_bsz", "false")):
        tokens = source.number(limit, 32768 if role == "critic" else 16384)
    elif source.has(f"{rows}_per_gpu"):
        tokens = source.number(f"{rows}_per_gpu") * longest
    elif source.has(rows):
        tokens = max(source.number(rows) // _devices(source), 1) * longest
    else:
        yield NotNeeded(names, "verl uses it only with use_dynamic_bsz=True")
        return
    yield Here(names, {f"{role}.microbatch_tokens": int(tokens)})


def _warmup(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """verl changes the learning rate once per step, which may have several optimizer steps."""
    role = "critic" if any(name.startswith("critic.") for name in names) else "actor"
    ratio = f"{role}.optim.lr_warmup_steps_ratio"
    steps, share = source.number(f"{role}.optim.lr_warmup_steps", -1), source.number(ratio)
    if steps < 0 and share:
        if not source.has("trainer.total_training_steps"):
            yield Missing(
                f"{ratio}={share:g}",
                f"set {role}.optimizer.warmup_steps to this share of all optimizer steps, which depend on the data",
            )
            return
        steps = int(share * source.number("trainer.total_training_steps"))
    minibatch = source.count(f"{role}.ppo_mini_batch_size", source.number("actor.ppo_mini_batch_size"))
    updates = max(source.number("data.train_batch_size") / minibatch, 1)
    updates *= source.number(f"{role}.ppo_epochs", source.number("actor.ppo_epochs", 1))
    yield Here(names, {f"{role}.optimizer.warmup_steps": int(steps * updates)} if steps > 0 else {})


def _betas(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    for name in names:
        values = as_list(source.text(name).replace("(", "[").replace(")", "]"))
        keys = [f"{name.partition('.')[0]}.optimizer.beta{number}" for number in (1, 2)]
        yield Here([name], dict(zip(keys, values, strict=False)))


def _replicas(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """`fsdp_size` devices hold one copy of the model."""
    for name in names:
        size, devices = source.number(name, -1), _devices(source)
        copies = int(devices // size) if 0 < size < devices else 1
        yield Here([name], {f"{name.partition('.')[0]}.parallelism.replicas": copies} if copies > 1 else {})


def _devices(source: Given) -> float:
    return source.count("trainer.n_gpus_per_node", 8) * source.count("trainer.nnodes", 1)


def _evaluation(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """verl evaluates greedily unless `do_sample` is set."""
    section = "rollout.val_kwargs"
    if not source.is_true(f"{section}.do_sample"):
        yield Here(names, {"rollout.eval_sampling.temperature": 0}, because=f"default {section}.do_sample=False")
        return
    settings: dict[str, object] = {"rollout.eval_sampling.temperature": source.text(f"{section}.temperature", "0")}
    if source.has(f"{section}.top_p"):
        settings["rollout.eval_sampling.top_p"] = source.text(f"{section}.top_p")
    if source.number(f"{section}.top_k", -1) > 0:
        settings["rollout.eval_sampling.top_k"] = source.text(f"{section}.top_k")
    yield Here(names, settings)


def _trackers(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    wanted = as_list(source.text("trainer.logger"))
    found = list(dict.fromkeys([*(_TRACKERS[name] for name in wanted if name in _TRACKERS), "jsonl"]))
    yield Here(names, {"trainer.trackers": found})
    if unknown := [name for name in wanted if name not in _TRACKERS]:
        yield NotNeeded([f"trainer.logger={','.join(unknown)}"], f"trackers are {', '.join(_TRACKERS.values())}")


def _reward(source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """verl's own scores depend on the `data_source` of a row, unless there is a function or a reward model."""
    settings: dict[str, object] = {}
    functions = []
    path, model = "custom_reward_function.path", "reward_model.model.path"
    if source.is_true("reward_model.enable"):
        if not source.has(model):
            yield Missing("reward_model.enable=True", f"{model} is not given; use reward.model.path")
        settings["reward.model.path"] = source.text(model)
        yield NotNeeded(source.names("custom_reward_function."), "with a reward model, verl takes its scores")
    elif source.has(path):
        name = source.text("custom_reward_function.name", "compute_score")
        functions.append(f"{source.text(path)}:{name}")
        own = [(key.removeprefix(f"{_KWARGS}."), source.text(key)) for key in source.names(f"{_KWARGS}.")]
        settings |= {f"reward.settings.{name}.{key}": value for key, value in own}
    else:
        functions.append(_DEFAULT_FUNCTION)
    for section in _OVERLONG if not source.is_true(f"{_FILTER}.enable") else ():
        if source.is_true(f"{section}.enable"):
            functions.append("overlong")
            settings["reward.settings.overlong.buffer_tokens"] = int(source.number(f"{section}.len"))
            settings["reward.settings.overlong.penalty"] = source.number(f"{section}.penalty_factor", 1)
    if functions[:1] == [_DEFAULT_FUNCTION]:
        yield Here((), {"reward.functions": functions}, because=_BY_SOURCE)
    elif functions:
        settings["reward.functions"] = functions
    yield Here(names, settings)


_BY_SOURCE = "no reward function (verl selects one by the data_source of a row; gsm8k compares final answers)"
_SYSTEM = System(
    VERL,
    rules={
        "estimator": _estimator,
        "kl": _kl,
        "tokens": _tokens,
        "tokens critic": _tokens,
        "warmup": _warmup,
        "warmup critic": _warmup,
        "betas": _betas,
        "betas critic": _betas,
        "replicas": _replicas,
        "replicas critic": _replicas,
        "evaluation": _evaluation,
        "trackers": _trackers,
        "reward": _reward,
    },
    always=("estimator", "evaluation", "reward"),
    accepts_own=True,
    key_of=verl_key,
)
