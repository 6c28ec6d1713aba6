"""Rules on optional packages that settings name. They need neither torch nor the packages themselves."""

from collections.abc import Callable, Iterator
from functools import partial

from hybridflow.config.derived import is_evaluated, num_devices, pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.errors import MissingExtraError
from hybridflow.optional import check_installed

_OF_REWARDS = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Packages of built-in reward functions."""

_OF_TRACKERS = ("wandb", "mlflow")
_OF_URLS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Packages for the protocols of URLs."""

_OF_DATA = "reasoning_gym:"
"""The prefix of data files that this package generates."""


def package_problems(config: Experiment) -> Iterator[MissingExtraError]:
    """Packages that engines, adapters, trackers, rewards, data or the backend need, and that are not installed.

    The section `critic` is not checked here: only a dataflow with a critic reads it.
    """
    for setting, check in _checks(config):
        try:
            check()
        except MissingExtraError as error:
            key = setting.partition("=")[0]
            yield MissingExtraError(f"{setting}: {error.message}", remedy=error.remedy, key=key)


def _checks(config: Experiment) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each setting that needs a package, and the check for it."""
    if config.trainer.backend is BackendKind.ray:
        yield "trainer.backend=ray", partial(check_installed, "ray")
    elif config.trainer.backend is BackendKind.auto and sum(pool_sizes(config).values()) > 1:
        further = "placement.pools" if config.placement.pools else "placement.roles"
        wanted = f"trainer.devices={num_devices(config)}" if num_devices(config) > 1 else further
        yield wanted, partial(check_installed, "ray")
    if (rollout := config.rollout.engine) is not None:
        yield f"rollout.engine={rollout}", rollout_traits(rollout).check_installed
    engines = {"actor": config.actor.engine} | {f"roles.{name}": role.engine for name, role in config.roles.items()}
    engines |= {} if config.reward.model.path is None else {"reward": config.reward.engine}
    for section, engine in engines.items():
        if engine in TRAINING_ENGINES:  # all but `auto`, which selects one that needs no package
            yield f"{section}.engine={engine.name}", TRAINING_ENGINES[engine].check_installed
    url = config.trainer.checkpoint_url or ""
    if (package := _OF_URLS.get(url.partition("://")[0])) is not None:
        yield f"trainer.checkpoint_url={url}", partial(check_installed, package)
    for setting, package in _named(config):
        yield setting, partial(check_installed, package)


def _named(config: Experiment) -> Iterator[tuple[str, str]]:
    if rank := config.actor.lora.rank:
        yield f"actor.lora.rank={rank}", "peft"
    for name in config.trainer.trackers:
        if name in _OF_TRACKERS:
            yield f"trainer.trackers=[{name}]", name
    functions = {"reward": config.reward.functions} | {f"roles.{n}": role.functions for n, role in config.roles.items()}
    for section, names in functions.items():
        for name in names:
            if name in _OF_REWARDS:
                yield f"{section}.functions=[{name}]", _OF_REWARDS[name]
    files = [*config.data.train_files, *config.data.pretraining_files]
    files += config.data.eval_files if is_evaluated(config) else []
    for name in files:
        if name.startswith(_OF_DATA):
            yield name, "reasoning_gym"
