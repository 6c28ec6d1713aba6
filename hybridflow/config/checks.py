"""Rules across sections, checked before any process starts. Each says what was found and what to do."""

import difflib
import unicodedata

from hybridflow.config.choices import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    advantage_name,
    policy_loss_name,
    preference_loss_name,
)
from hybridflow.config.correction_checks import check_correction
from hybridflow.config.data_checks import check_data
from hybridflow.config.derived import num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.kl_checks import check_kl
from hybridflow.config.layout_checks import check_layouts
from hybridflow.config.ranges import check_ranges
from hybridflow.errors import STRICT, ConfigError, Faults

_COST_OF_THE_TASK = "hybridflow.rewards.functions.far_off.far_off"
_LONGEST_NAME = 100
_NOT_PRINTED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of control and format characters, surrogates and line separators."""


def check(config: Experiment, faults: Faults = STRICT) -> None:
    """Adds a `ConfigError` for each rule that the configuration breaks."""
    check_ranges(config, faults)
    rules = (_check_run, _check_methods, _check_inputs, _check_cost, _check_pretraining, check_kl, check_correction)
    with faults.caught():
        check_data(config.data)
    for rule in rules:
        with faults.caught():
            rule(config)
    with faults.caught():  # layouts are of pools that exist
        check_placement(config)
        check_layouts(config)


def _check_methods(config: Experiment) -> None:
    """Methods are among those that can be chosen."""
    if config.algorithm.aggregation is not None:
        _one_of("algorithm.aggregation", config.algorithm.aggregation, AGGREGATIONS)
    advantage_name(config.algorithm.advantage)
    policy_loss_name(config.algorithm.policy_loss)
    preference_loss_name(config.algorithm.preference.loss)
    if config.algorithm.kl.estimator is not None:
        _one_of("algorithm.kl.estimator", config.algorithm.kl.estimator, KL_ESTIMATORS)


def _check_inputs(config: Experiment) -> None:
    """There is a model, data, and one weight per reward function."""
    if not config.model.path:
        raise ConfigError("model.path is empty.", remedy="Give a Hugging Face directory, or builtin:calculator.")
    if not config.data.train_files:
        raise ConfigError("data.train_files is empty.", remedy="Give a file, or builtin:calculator/train.")
    for section, role in {"reward": config.reward, **{f"roles.{n}": r for n, r in config.roles.items()}}.items():
        if role.weights and len(role.weights) != len(role.functions):
            raise ConfigError(
                f"{section}.weights has {len(role.weights)} numbers for {len(role.functions)} {section}.functions.",
                remedy="Give one weight per function, or none at all.",
            )


def _check_run(config: Experiment) -> None:
    """The name of the run is that of its directory, and of nothing outside `runs/`."""
    fault, name = None, config.trainer.experiment
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
    """A loss of pretraining has its texts, and they are not those of another model."""
    weight, files = config.algorithm.pretraining_coefficient, config.data.pretraining_files
    if weight and not files:
        raise ConfigError(
            f"algorithm.pretraining_coefficient={weight:g}, but data.pretraining_files is empty.",
            remedy="Name texts or demonstrations: data.pretraining_files=[path,...], or use a coefficient of 0.",
        )
    path = config.model.path or ""
    if files and all(file.startswith("builtin:") for file in files) and not path.startswith("builtin:"):
        raise ConfigError(
            f"data.pretraining_files=[{','.join(files)}] are texts of the built-in model, and model.path={path}.",
            remedy="Name texts for your model: data.pretraining_files=[path,...].",
        )


def check_placement(config: Experiment) -> None:
    """Raises `ConfigError` unless roles live in pools that exist, and pools fit the devices."""
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


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{key}={value} is unknown.", remedy=f"{hint}Choose from: {', '.join(choices)}.")
