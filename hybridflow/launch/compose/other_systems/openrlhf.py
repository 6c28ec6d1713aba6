"""Arguments of OpenRLHF that are translated together."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hybridflow.config.other_names import other_defaults
from hybridflow.launch.compose.other_systems.translation import (
    NO_CRITIC,
    Given,
    Here,
    Missing,
    NotNeeded,
    Outcome,
    System,
    Translation,
    in_quotes,
    limit_of_both,
    options_of,
    translated,
    translated_without,
)

OPENRLHF = "OpenRLHF"
OPENRLHF_TRAINERS: Mapping[str, str] = {"ppo": "ppo", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward_model"}
"""The modules `openrlhf.cli.train_NAME`, and the commands here."""

_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
}
_DEVICES_OF_A_NODE = 8


def openrlhf_translation(trainer: str, options: Mapping[str, str], launch: Sequence[str]) -> Translation:
    """Translates the arguments of `openrlhf.cli.train_TRAINER`. `launch` are the words before them."""
    given = {name.replace("-", "_"): value for name, value in options.items()}
    given.pop("local_rank", None)
    rules = {name: partial(rule, trainer) for name, rule in _RULES.items()}
    rules["devices"] = partial(_devices, launch)
    always = ("batch", *(("estimator", "kl", "reward", "placement") if trainer == "ppo" else ("devices",)))
    system = System(OPENRLHF, rules, always)
    defaults = {**other_defaults(OPENRLHF), **other_defaults(f"{OPENRLHF} {trainer}")}
    if trainer == "ppo" and _estimator_name(Given(given, defaults)) != "ppo":
        critic = [name for name in given | defaults if name.startswith("critic_") or name == "value_clip"]
        return translated_without({NO_CRITIC: critic}, system, given, defaults)
    return translated(system, given, defaults)


def _estimator_name(source: Given) -> str:
    name = source.text("advantage_estimator")
    return _ESTIMATORS.get(name, name)


def _estimator(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    name = _estimator_name(source)
    if name not in _ESTIMATORS.values():
        yield Missing(f"advantage_estimator={name}", f"choose from: {', '.join(_ESTIMATORS)}")
        return
    settings: dict[str, object] = {"algorithm": name}
    if name == "grpo" and source.is_true("no_advantage_std_norm"):
        settings["algorithm.advantage"] = "dr_grpo"
    if source.is_true("dynamic_filtering"):
        settings |= {"dataflow": "dapo", "dataflow_settings.overlong_buffer": 0}
    yield Here(names, settings)


def _batch(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """`rollout_batch_size` counts prompts, and `train_batch_size` responses."""
    size, epochs = source.number("train_batch_size", 128), source.text("max_epochs", "1")
    if trainer != "ppo":
        yield Here(names, {"data.batch_size": size, "trainer.epochs": epochs}, because="default train_batch_size=128")
        return
    samples = source.count("n_samples_per_prompt", 1)
    roles = ["actor", *(["critic"] if _estimator_name(source) == "ppo" else [])]
    settings: dict[str, object] = {
        "rollout.samples_per_prompt": samples,
        "data.batch_size": source.number("rollout_batch_size", 1024),
        "trainer.epochs": source.text("num_episodes", "1"),
        **{f"{role}.minibatch_size": int(size / samples) for role in roles},
        **({f"{role}.epochs": epochs for role in roles} if epochs != "1" else {}),
    }
    if size % samples:
        yield Missing(f"train_batch_size={size:g}", f"it divides groups of {samples:g} responses; use a multiple")
    yield Here(names, settings, because="default rollout_batch_size=1024")


def _tokens(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    longest = source.number("prompt_max_len", 1024) + source.number("generate_max_len", 1024)
    if trainer != "ppo":
        longest = source.number("max_len", 2048)
    tokens = source.number("micro_train_batch_size", 4) * longest
    if source.is_true("use_dynamic_batch"):
        tokens = source.number("train_max_tokens_per_gpu", 16192)
    yield Here(names, {"actor.microbatch_tokens": int(tokens)})


def _length(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    half = int(source.number("max_len", 2048)) // 2
    if "max_len" in source.given:
        yield Missing(f"max_len={2 * half}", limit_of_both(half, half))
    settings = {"data.max_prompt_tokens": half, "data.max_response_tokens": half, "data.truncation": "drop"}
    yield Here(names, settings)


def _kl(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    if not source.number("init_kl_coef"):
        yield Here(names)
        return
    settings: dict[str, object] = {
        "algorithm.kl.placement": "loss" if source.is_true("use_kl_loss") else "reward",
        "algorithm.kl.coefficient": source.text("init_kl_coef"),
        "algorithm.kl.estimator": "k3" if source.is_true("use_kl_estimator_k3") else source.text("kl_estimator", "k1"),
    }
    if settings["algorithm.kl.placement"] == "loss" and settings["algorithm.kl.estimator"] == "k1":
        settings["algorithm.kl.allow_k1_loss"] = True
    if source.has("kl_target"):
        settings["algorithm.kl.target"] = source.text("kl_target")
        settings["algorithm.kl.horizon"] = source.text("kl_horizon", "10000")
    yield Here(names, settings)


def _reward(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    settings: dict[str, object] = {}
    functions = [_function(url) for url in source.text("remote_rm_url").split(",") if url]
    if source.has("overlong_buffer_len"):
        functions.append("overlong")
        settings["reward.settings.overlong.buffer_tokens"] = source.text("overlong_buffer_len")
        settings["reward.settings.overlong.penalty"] = source.text("overlong_penalty_factor", "1")
    if functions:
        settings["reward.functions"] = functions
    if source.has("reward_pretrain"):
        settings["reward.model.path"] = in_quotes(source.text("reward_pretrain"))
        own = source.has("critic_pretrain") or source.has("remote_rm_url") or source.has("agent_func_path")
        if _estimator_name(source) == "ppo" and not own:  # OpenRLHF's critic begins as the first reward model
            settings["critic.model.path"] = in_quotes(source.text("reward_pretrain").partition(",")[0])
    if not settings and not source.has("agent_func_path"):
        yield Missing("reward_pretrain", "no reward is given; set reward.functions or reward.model.path")
    yield Here(names, settings)


def _function(url: str) -> str:
    return f"{url}:reward_func" if url.endswith(".py") else url


def _placement(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """Pools of the roles that OpenRLHF places apart; with `colocate_all_models`, one pool."""
    if not names:
        yield NotNeeded(["the number of GPUs"], "1 device is assumed; set trainer.devices")
        return
    nodes, uses_vllm = source.number("actor_num_nodes", 1), source.number("vllm_num_engines") > 0
    engine = {"rollout.engine": "vllm"} if uses_vllm else {}
    if source.is_true("colocate_all_models"):
        settings = {"trainer.devices": source.number("actor_num_gpus_per_node", 8), "trainer.nodes": nodes}
        yield Here(names, {**engine, **settings})
        return
    sizes, roles = {"actor": _size(source, "actor")}, {"actor": "actor"}
    if source.number("init_kl_coef"):
        roles["reference"] = "actor" if source.is_true("colocate_actor_ref") else "reference"
        sizes |= {} if roles["reference"] == "actor" else {"reference": _size(source, "ref")}
    if _estimator_name(source) == "ppo":
        roles["critic"], sizes["critic"] = "critic", _size(source, "critic")
    if source.has("reward_pretrain"):
        is_shared = "critic" in sizes and source.is_true("colocate_critic_reward")
        roles["reward"] = "critic" if is_shared else "reward"
        sizes |= {} if is_shared else {"reward": _size(source, "reward")}
    if uses_vllm:
        roles["rollout"] = "rollout"
        sizes["rollout"] = int(source.number("vllm_num_engines") * source.count("vllm_tensor_parallel_size", 1))
    total = sum(sizes.values())
    per_node = total if total <= _DEVICES_OF_A_NODE else _DEVICES_OF_A_NODE
    if total % per_node:
        yield Missing("placement", f"the roles use {total} GPUs; set trainer.devices and trainer.nodes to as many")
    pools = ", ".join(f"{name}: {{devices: {size}}}" for name, size in sizes.items())
    placed = ", ".join(f"{role}: {pool}" for role, pool in roles.items())
    where = {**engine, "trainer.devices": per_node, "trainer.nodes": total // per_node}
    yield Here(names, {**where, "placement.pools": f"{{{pools}}}", "placement.roles": f"{{{placed}}}"})


def _devices(launch: Sequence[str], source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    """The GPUs of deepspeed or torchrun; deepspeed takes all of the machine unless it is given their number."""
    options = options_of(launch)
    given = options.get("num_gpus") or options.get("nproc_per_node") or options.get("nproc-per-node")
    nodes = options.get("num_nodes") or options.get("nnodes") or "1"
    here = {"trainer.devices": given or "auto", **({"trainer.nodes": nodes} if nodes != "1" else {})}
    if "include" in options or "hostfile" in options:
        yield Missing("include" if "include" in options else "hostfile", "set trainer.devices and trainer.nodes")
    elif given or "deepspeed" in launch:
        yield Here((), here, because=f"the number of GPUs is {given}" if given else "deepspeed takes all GPUs")


def _size(source: Given, role: str) -> int:
    return int(source.count(f"{role}_num_nodes", 1) * source.count(f"{role}_num_gpus_per_node", 8))


def _betas(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    roles = ["actor", *(["critic"] if trainer == "ppo" and _estimator_name(source) == "ppo" else [])]
    for role in roles:
        yield Here(names, _each((f"{role}.optimizer.beta1", f"{role}.optimizer.beta2"), source.text("adam_betas")))


def _clip(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    bounds = source.text("eps_clip_low_high") or ",".join([source.text("eps_clip", "0.2")] * 2)
    yield Here(names, _each(("algorithm.clip_low", "algorithm.clip_high"), bounds))


def _each(keys: Sequence[str], values: str) -> dict[str, object]:
    """The values of a list, one per key."""
    return dict(zip(keys, values.split(","), strict=False))


def _trackers(trainer: str, source: Given, names: Sequence[str]) -> Iterator[Outcome]:
    found = [name for name in ("wandb", "tensorboard") if source.has(f"use_{name}")]
    yield Here(names, {"trainer.trackers": ["console", *found, "jsonl"]})


_RULES = {
    "estimator": _estimator,
    "batch": _batch,
    "tokens": _tokens,
    "length": _length,
    "kl": _kl,
    "reward": _reward,
    "placement": _placement,
    "betas": _betas,
    "clip": _clip,
    "trackers": _trackers,
}
