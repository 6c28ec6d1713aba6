"""The dataflow by name or from a file, its settings, and the functions that `algorithm` names for it."""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from types import NoneType

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.config import fields as config_fields
from hybridflow.config.choices import is_own
from hybridflow.config.experiment import Experiment
from hybridflow.config.nearest import did_you_mean, known_settings
from hybridflow.config.other_names import replacement
from hybridflow.config.ranges import check_fields
from hybridflow.config.user_code import described, load_member, reporting_exits
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.dpo import DPO
from hybridflow.dataflows.evaluate import Evaluate, Generate
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import (
    DATA_KINDS,
    Dataflow,
    is_in_halves,
    learns_from_preferences,
    learns_from_samples,
)
from hybridflow.dataflows.kto import KTO
from hybridflow.dataflows.pf_ppo import PFPPO
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.ppo_ptx import PPOPtx
from hybridflow.dataflows.remax import ReMax
from hybridflow.dataflows.reward_model import RewardModeling
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import STRICT, ConfigError, HybridflowError, Problems
from hybridflow.launch.compose.files import wrong_value
from hybridflow.launch.compose.presets import preset_name, presets
from hybridflow.workers.named_functions import PREFERENCE_OFFERS, NamedFunction, estimator, policy_loss, preference_loss


@dataclass(frozen=True)
class NamedFunctions:
    """The functions that `algorithm` names, with their settings; None for those that the dataflow does not call."""

    estimator: NamedFunction | None = None
    policy_loss: NamedFunction | None = None
    preference_loss: NamedFunction | None = None


DATAFLOWS: dict[str, type[Dataflow]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "remax": ReMax,
    "dapo": DAPO,
    "pf_ppo": PFPPO,
    "ppo_ptx": PPOPtx,
    "safe_rlhf": SafeRLHF,
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "reward_model": RewardModeling,
}
"""The algorithms as programs."""

WITHOUT_TRAINING: dict[str, type[Dataflow]] = {"evaluate": Evaluate, "generate": Generate}
"""Dataflows of `hybridflow evaluate` and `hybridflow generate`."""


_CALLED = ("step", "collect", "learn", "filter_out", "evaluate", "precompute", "state", "restore", "wants_reference")
_TUPLE = (tuple, list)
_DECLARED = {
    "data": (str,),
    "rows_per_prompt": (int, NoneType),
    "provides": (*_TUPLE, NoneType),
    "cost_critics": _TUPLE,
}


def find_dataflow(name: str) -> type[Dataflow]:
    """The class behind `dataflow=<name>`, `dataflow=<file.py>:<Class>` or `dataflow=<package.module.Class>`."""
    if name in DATAFLOWS or name in WITHOUT_TRAINING:
        return (DATAFLOWS | WITHOUT_TRAINING)[name]
    if not is_own(name) and preset_name(name) in presets():
        raise ConfigError(
            f"dataflow={name} is unknown, but an algorithm has that name.",
            remedy=f"Write algorithm={preset_name(name)}, which also selects the dataflow.",
        )
    if not is_own(name):
        raise ConfigError(
            f"dataflow={name} is unknown.",
            remedy=f"{did_you_mean(name, DATAFLOWS)}Choose from: {', '.join(DATAFLOWS)}, or file.py:Class.",
        )
    found = load_member(name, key="dataflow")
    if not (isinstance(found, type) and issubclass(found, Dataflow)):
        class_name = name.replace(":", ".").rpartition(".")[2]
        raise ConfigError(
            f"dataflow={name}: '{class_name}' is not a dataflow.",
            remedy=f"Write 'class {class_name}(Dataflow)', from hybridflow.dataflows.interface.",
        )
    _check_steps(name, found)
    _check_declared(name, found)
    return found


def _check_steps(name: str, found: type[Dataflow]) -> None:
    """Raises a `ConfigError` for a class without `step` that does not define both of its halves."""
    halves = {"collect": found.collect is not Dataflow.collect, "learn": found.learn is not Dataflow.learn}
    if not is_in_halves(found) or all(halves.values()):
        return
    missing = " and ".join(f"'{half}'" for half, is_defined in halves.items() if not is_defined)
    raise ConfigError(
        f"dataflow={name}: {found.__name__} does not define {missing}.",
        remedy="Write 'def collect(self, prompts)' and 'def learn(self, batch)' in it, or 'def step(self, prompts)' if"
        " it does not sample; see hybridflow.dataflows.interface.Dataflow.",
    )


def _check_declared(name: str, found: type[Dataflow]) -> None:
    """Raises a `ConfigError` for an attribute of the class that has another name, type or values here."""
    if any("foreknown" in vars(base) for base in found.__mro__):
        raise ConfigError(
            f"dataflow={name}: {found.__name__} defines 'foreknown', which is now called 'precompute'.",
            remedy="Rename the method.",
        )
    for member, kinds in _DECLARED.items():
        with calling(found, member):
            value = getattr(found, member)
        if not isinstance(value, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
            wrong = f"dataflow={name}: {found.__name__}.{member}={value!r} has the wrong type."
            raise ConfigError(wrong, remedy=f"It must be {expected}.")
    for member in _CALLED:
        _check_called(name, found, member)
    if found.data not in DATA_KINDS:
        raise ConfigError(
            f"dataflow={name}: {found.__name__}.data={found.data!r} is unknown.",
            remedy=f"{did_you_mean(found.data, DATA_KINDS)}Choose from: {', '.join(DATA_KINDS)}.",
        )


def _check_called(name: str, found: type[Dataflow], member: str) -> None:
    """Raises a `ConfigError` for a method without the parameters of the one in `Dataflow`."""
    is_of_class = member == "wants_reference"
    owner, start = (found, "@classmethod def") if is_of_class else (object.__new__(found), "def")
    expected = inspect.signature(getattr(Dataflow, member)).parameters.values()
    named = [each.name for each in expected if each.kind is each.KEYWORD_ONLY]
    given = [each.name for each in expected if each.name not in ("self", *named)]
    try:
        inspect.signature(getattr(owner, member)).bind(*given, **dict.fromkeys(named))
    except TypeError as error:
        parameters = ", ".join(["cls" if is_of_class else "self", *given, *(["*", *named] if named else [])])
        call = ", ".join([*given, *(f"{each}=..." for each in named)])
        raise ConfigError(
            f"dataflow={name}: {found.__name__}.{member} cannot be called with ({call}): {error}.",
            remedy=f"Write '{start} {member}({parameters})' in it; see hybridflow.dataflows.interface.Dataflow.",
        ) from error


def make_settings(dataflow: type[Dataflow], given: Mapping[str, object], problems: Problems = STRICT) -> object:
    """The dataflow's `Settings` with the values of `dataflow_settings.*`, checked for names, types and ranges.

    With `problems` that collect, values of unknown names and wrong types are left out.
    """
    settings = dataflow.Settings
    if not is_dataclass(settings):
        raise ConfigError(f"{dataflow.__name__}.Settings is not a dataclass.", remedy="Decorate it with @dataclass.")
    names = [field.name for field in fields(settings)]
    _check_fields_of(settings, f"{dataflow.__name__}.Settings")
    filled = OmegaConf.structured(settings)
    for name, value in given.items():
        key = f"dataflow_settings.{name}"
        with problems.caught(), _settings_named(settings):
            if name not in names:
                raise ConfigError(
                    f"There is no setting '{key}'.",
                    remedy=replacement(key) or f"{did_you_mean(name, names)}{known_settings(dataflow.__name__, names)}",
                )
            filled = OmegaConf.merge(filled, {name: value})
    with calling(dataflow, "Settings"), _settings_named(settings):
        made = OmegaConf.to_object(filled)
    check_fields(made, "dataflow_settings.", problems)
    return made


@contextmanager
def calling(dataflow: type[Dataflow], member: str) -> Iterator[None]:
    """Turns an error of user code in a member of the class into a `ConfigError` with the class, file and line."""
    try:
        with reporting_exits(f"{dataflow.__name__}.{member}", callers={__file__}):
            yield
    except HybridflowError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{dataflow.__name__}.{member} raised {described(error, callers={__file__})}.", remedy=f"Fix {member}."
        ) from error


def _check_fields_of(settings: type, owner: str) -> None:
    """Raises a `ConfigError` for the first field whose type or default cannot be that of a setting."""
    for field in fields(settings):
        alone = make_dataclass("Settings", [(field.name, field.type, field)])
        alone.__module__ = settings.__module__  # in which names of types are looked up
        try:
            OmegaConf.structured(alone)
        except Exception as error:  # OmegaConf's, or one of the user's annotation or default
            base = next(base for base in settings.__mro__ if field.name in inspect.get_annotations(base))
            lines, line = inspect.getsourcelines(base)
            line += next(n for n, text in enumerate(lines) if re.match(rf"\s*{field.name}\s*:", text))
            raise ConfigError(
                f"{owner}.{field.name} cannot be a setting: {str(error).splitlines()[0].rstrip('.')}"
                f" ({Path(inspect.getfile(base)).name}, line {line}).",
                remedy="Use int, float, bool, str, an Enum, a dataclass, or a list or dict of these, with a default.",
            ) from error


@contextmanager
def _settings_named(settings: type) -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise wrong_value(f"dataflow_settings.{key}", error, config_fields.find(key, settings)) from error


def named_functions(config: Experiment, dataflow: type[Dataflow], problems: Problems = STRICT) -> NamedFunctions:
    """The estimator and the losses that the dataflow calls; adds a `ConfigError` for each that cannot be called."""
    algorithm, makers = config.algorithm, {}
    if learns_from_samples(dataflow):
        makers = {"estimator": partial(estimator, algorithm), "policy_loss": partial(policy_loss, algorithm)}
    loss = PREFERENCE_LOSSES.get(algorithm.preference.loss)
    has_rule = loss is not None and loss.data != dataflow.data and dataflow.provides is not None  # for other data
    if learns_from_preferences(dataflow) and not has_rule:
        makers["preference_loss"] = partial(preference_loss, algorithm, PREFERENCE_OFFERS[dataflow.data])
    found: dict[str, NamedFunction] = {}
    for name, make in makers.items():
        with problems.caught():
            found[name] = make()
    return NamedFunctions(**found)
