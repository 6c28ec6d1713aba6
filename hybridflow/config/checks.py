"""Rules across sections, checked before any process starts. Each says what was found and what to do."""

import difflib
import unicodedata
from dataclasses import dataclass

from hybridflow.config.choices import (
    AGGREGATIONS,
    DATA_DATAFLOWS,
    KL_ESTIMATORS,
    LOSSES_WITHOUT_REFERENCE,
    PAIR_LOSSES,
    advantage_name,
    is_own,
    policy_loss_name,
    preference_loss_name,
)
from hybridflow.config.correction_checks import check_correction
from hybridflow.config.data_checks import check_data
from hybridflow.config.derived import minibatch_prompts, num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.kl_checks import check_kl
from hybridflow.config.layout_checks import check_layouts, has_critic
from hybridflow.config.ranges import check_ranges
from hybridflow.config.training import Training
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class _Fitting:
    """The estimators that a dataflow of ours has (`is_closed`), or does not have, the columns for."""

    names: tuple[str, ...]
    is_closed: bool


_WITH_CRITIC = _Fitting(("gae",), is_closed=True)
_WITHOUT_CRITIC = _Fitting(("gae", "remax"), is_closed=False)
_ESTIMATORS = {
    "ppo": _WITH_CRITIC,
    "pf_ppo": _WITH_CRITIC,
    "ppo_ptx": _WITH_CRITIC,
    "safe_rlhf": _WITH_CRITIC,
    "grpo": _WITHOUT_CRITIC,
    "dapo": _WITHOUT_CRITIC,
    "remax": _Fitting(("remax",), is_closed=True),
}
_COST_OF_THE_TASK = "hybridflow.rewards.functions.far_off.far_off"
_PROMPTS_OF_THE_TASK = ("builtin:calculator/train", "builtin:calculator/eval")
_DATAFLOW_OF = {"gae": "ppo", "remax": "remax"}
_LONGEST_NAME = 100
_NOT_PRINTED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of control and format characters, surrogates and line separators."""
_WITHOUT_GROUPS = ("gae", "remax", "reinforce_plus_plus")


def check(config: Experiment) -> None:
    """Raises `ConfigError` for the first rule that the configuration breaks."""
    check_ranges(config)
    check_data(config.data)
    rules = (_names, _batches, _sampling, _algorithm, check_kl, check_correction)
    for rule in (*rules, _placement, check_layouts):
        rule(config)


def _names(config: Experiment) -> None:
    """Names that are one of a list, and the run's own."""
    _check_experiment(config.trainer.experiment)
    if config.algorithm.aggregation is not None:
        _one_of("algorithm.aggregation", config.algorithm.aggregation, AGGREGATIONS)
    advantage_name(config.algorithm.advantage)
    policy_loss_name(config.algorithm.policy_loss)
    preference_loss_name(config.algorithm.preference.loss)
    if config.algorithm.kl.estimator is not None:
        _one_of("algorithm.kl.estimator", config.algorithm.kl.estimator, KL_ESTIMATORS)
    if not config.model.path:
        raise ConfigError("model.path is empty.", remedy="Give a Hugging Face directory, or builtin:calculator.")
    if not config.data.train_files:
        raise ConfigError("data.train_files is empty.", remedy="Give a file, or builtin:calculator/train.")
    weights, functions = config.reward.weights, config.reward.functions
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} numbers for {len(functions)} reward.functions.",
            remedy="Give one weight per function, or none at all.",
        )


def _check_experiment(name: str) -> None:
    """The name of the run is that of its directory, and of nothing outside `runs/`."""
    fault = None
    if not name.strip() or name in (".", ".."):
        fault = "is not a name"
    elif "/" in name or "\\" in name:
        fault = "is a path"
    elif any(unicodedata.category(character) in _NOT_PRINTED for character in name):
        fault = "has control characters"
    elif max(len(name), len(name.encode()) / 2) > _LONGEST_NAME:
        fault = f"has {len(name)} characters"
    if fault is not None:
        shown = ascii(name)[1:-1]
        raise ConfigError(
            f"trainer.experiment={shown[:_LONGEST_NAME]}{'...' * (len(shown) > _LONGEST_NAME)} {fault}.",
            remedy=f"Use a plain name of at most {_LONGEST_NAME} characters, such as gsm8k_ppo; write paths as"
            " trainer.run_dir.",
        )


def _batches(config: Experiment) -> None:
    """Minibatches divide batches."""
    for name, training in _trained(config).items():
        if name == "critic" and not has_critic(config):
            continue
        size = minibatch_prompts(config, training)
        if config.data.batch_size % size:
            divisors = [d for d in range(1, config.data.batch_size + 1) if config.data.batch_size % d == 0]
            close = min(divisors, key=lambda divisor: abs(divisor - size))
            raise ConfigError(
                f"{name}.minibatch_size={size} does not divide data.batch_size={config.data.batch_size}.",
                remedy=f"Use {close}, or another divisor: both count prompts, over all devices.",
            )


def _sampling(config: Experiment) -> None:
    """What is drawn can be learnt from."""
    if config.rollout.sampling.temperature == 0 and config.dataflow not in DATA_DATAFLOWS:
        raise ConfigError(
            "rollout.sampling.temperature=0 always gives the same response, so there is nothing to learn from.",
            remedy="Use 1.0 for training; rollout.eval_sampling.temperature=0 is fine.",
        )


def _algorithm(config: Experiment) -> None:
    """Settings that only make sense together."""
    _check_estimator(config, advantage_name(config.algorithm.advantage))
    _check_pairs(config)
    _check_preference(config)
    _check_pretraining(config)
    _check_cost(config)


def _check_estimator(config: Experiment, advantage: str) -> None:
    """The dataflow has what the estimator wants, and the samples to compare."""
    fitting = _ESTIMATORS.get(config.dataflow)
    if fitting is None or is_own(advantage):
        return
    if (advantage in fitting.names) is not fitting.is_closed:
        near = fitting.names[0] if fitting.is_closed else "grpo"
        other, preset = _DATAFLOW_OF.get(advantage, "grpo"), _DATAFLOW_OF.get(advantage, advantage)
        raise ConfigError(
            f"dataflow={config.dataflow} cannot use algorithm.advantage={config.algorithm.advantage}.",
            remedy=f"Choose both with one word: algorithm={preset} (dataflow={other}), or use"
            f" algorithm.advantage={near}.",
        )
    is_alone = advantage in _WITHOUT_GROUPS and config.dataflow != "dapo"  # whose sampling compares as well
    if is_alone or config.rollout.samples_per_prompt > 1:
        return
    raise ConfigError(
        f"dataflow={config.dataflow} with algorithm.advantage={config.algorithm.advantage} compares samples of one"
        f" prompt, and rollout.samples_per_prompt={config.rollout.samples_per_prompt} leaves nothing to compare.",
        remedy="Use rollout.samples_per_prompt=8.",
    )


def _check_pairs(config: Experiment) -> None:
    """The built-in task of a trainer that learns from samples is none of preferences."""
    prompts = [name for name in config.data.train_files if name in _PROMPTS_OF_THE_TASK]
    if prompts and config.dataflow in ("dpo", "kto", "reward_model"):
        raise ConfigError(
            f"dataflow={config.dataflow} learns from pairs, and data.train_files=[{prompts[0]}] holds none.",
            remedy=f"Use python -m hybridflow.trainer.main_{config.dataflow}, which has pairs and settings that fit; or"
            " name pairs: data.train_files=[builtin:calculator/pairs].",
        )


def _check_preference(config: Experiment) -> None:
    """The trainer's loss is one of pairs, or of single responses."""
    preference = config.algorithm.preference
    loss = preference_loss_name(preference.loss)
    if is_own(loss) or config.dataflow not in ("dpo", "kto"):
        return
    is_alone = preference.reference_free or loss in LOSSES_WITHOUT_REFERENCE
    if is_alone and config.dataflow_settings.get("precompute_reference"):
        why = "reference_free=true" if preference.reference_free else f"loss={loss}"
        raise ConfigError(
            "dataflow_settings.precompute_reference=true works out what a reference says, and"
            f" algorithm.preference.{why} compares with none.",
            remedy="Leave dataflow_settings.precompute_reference out.",
        )
    if loss == "kto" and not (preference.desirable_weight or preference.undesirable_weight):
        raise ConfigError(
            "algorithm.preference.desirable_weight=0 and undesirable_weight=0 leave nothing to learn from.",
            remedy="Use 1 for one of them at least.",
        )
    if (loss in PAIR_LOSSES) is not (config.dataflow == "dpo"):
        fitting, other = (", ".join(PAIR_LOSSES), "kto") if config.dataflow == "dpo" else ("kto", "dpo")
        raise ConfigError(
            f"dataflow={config.dataflow} cannot use algorithm.preference.loss={loss}.",
            remedy=f"Use {fitting} (python -m hybridflow.trainer.main_{config.dataflow} does); or"
            f" python -m hybridflow.trainer.main_{other}, which can.",
        )


def _check_cost(config: Experiment) -> None:
    """The cost of the built-in task is not another model's."""
    cost = config.roles.get("cost")
    is_example = cost is not None and cost.functions == [_COST_OF_THE_TASK]
    if is_example and config.model.path is not None and not config.model.path.startswith("builtin:"):
        raise ConfigError(
            f"roles.cost.functions=[{_COST_OF_THE_TASK}] is a cost of the built-in task's sums, and"
            f" model.path={config.model.path} is another model.",
            remedy="Say what costs: 'roles.cost={kind: reward_model, model: {path: my/cost_model}}', or"
            " 'roles.cost={kind: reward_function, functions: [my_costs.py:f]}'.",
        )


def _check_pretraining(config: Experiment) -> None:
    """A loss of pretraining has its texts, its weight, and a dataflow that asks for it."""
    weight, files = config.algorithm.pretraining_coefficient, config.data.pretraining_files
    if weight and not files:
        raise ConfigError(
            f"algorithm.pretraining_coefficient={weight:g}, but data.pretraining_files is empty.",
            remedy="Name texts or demonstrations: data.pretraining_files=[path,...], or use a coefficient of 0.",
        )
    if is_own(config.dataflow):
        return
    if files and not weight:
        raise ConfigError(
            "data.pretraining_files are given, but algorithm.pretraining_coefficient=0 gives them no weight.",
            remedy="Use algorithm.pretraining_coefficient=0.1 with algorithm=ppo_ptx, or leave the files out.",
        )
    path = config.model.path or ""
    if files and all(file.startswith("builtin:") for file in files) and not path.startswith("builtin:"):
        raise ConfigError(
            f"data.pretraining_files=[{','.join(files)}] are texts of the built-in model, and model.path={path}.",
            remedy="Name texts for your model: data.pretraining_files=[path,...].",
        )
    if bool(weight) is not (config.dataflow == "ppo_ptx"):
        raise ConfigError(
            f"dataflow={config.dataflow} with algorithm.pretraining_coefficient={weight:g}.",
            remedy="Use algorithm=ppo_ptx, which has both; algorithm=ppo is the same without texts.",
        )


def _placement(config: Experiment) -> None:
    """Roles live in pools that exist, and pools fit the devices."""
    pools = config.placement.pools
    asked = dict(config.placement.roles) | {n: r.pool for n, r in config.roles.items() if r.pool is not None}
    for role, pool in asked.items():
        if pool not in pools:
            key = f"placement.roles.{role}" if role in config.placement.roles else f"roles.{role}.pool"
            raise ConfigError(
                f"{key}={pool}: there is no such pool.",
                remedy=f"Pools: {', '.join(pools) or 'none'}. Add one with placement.pools.{pool}.devices=1.",
            )
    total = sum(pool.devices for pool in pools.values())
    if pools and total != num_devices(config):
        raise ConfigError(
            f"The pools ask for {total} devices, and the run has {num_devices(config)}.",
            remedy=f"Set trainer.devices={total}, or change placement.pools.*.devices.",
        )


def _trained(config: Experiment) -> dict[str, Training]:
    return {"actor": config.actor, "critic": config.critic}


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{key}={value} is unknown.", remedy=f"{hint}Choose from: {', '.join(choices)}.")
