"""Turns the command line into a checked, sealed configuration. Starts no process, does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from enum import Enum
from itertools import accumulate
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from hybridflow.config import fields
from hybridflow.config.absolute_paths import with_absolute_paths
from hybridflow.config.algorithm import Algorithm, KLPlacement
from hybridflow.config.checks import check
from hybridflow.config.choices import chosen, is_own
from hybridflow.config.derived import divisors
from hybridflow.config.directory import config_directory
from hybridflow.config.experiment import Experiment
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.roles import DescribesRoles, Role
from hybridflow.config.section import leaves, sealed
from hybridflow.config.stored_inputs import found_in
from hybridflow.config.user_code import load_member
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.compose.files import apply_settings, read_files, wrong_value
from hybridflow.launch.compose.overrides import (
    OF_THE_USER,
    Setting,
    Typed,
    located,
    named_place,
    parse_overrides,
)
from hybridflow.observability.redaction import redacted_leaves


@dataclass(frozen=True)
class Composed:
    """A configuration, and the origin of each value:

    - `default`, `dataflow` (its class), `run file`, `command line`, `Python` or `device`
    - `file`: a file of the package, or the one that --config-name names
    - `data.batch_size`: a minibatch size of the package's own files that follows the user's batch size
    - `algorithm.kl.placement`: the estimator that it implies
    - `trainer.total_steps`: the length of a learning-rate schedule
    - `trainer.epochs`: the total steps
    - `auto`: the devices that were found for `trainer.devices=auto`
    - `plan`: a placement or a layout that hybridflow chose
    - `directory of config.yaml`: the directory of a run that continues from its record
    """

    config: Experiment
    origins: Mapping[str, str]
    user_keys: frozenset[str] = frozenset()
    """Keys that the user set, on the command line, in Python, or in their own files."""

    trainer: str = "ppo"
    """The name of the configuration that it starts from, of one of the trainers unless it is the user's own."""

    as_written: Mapping[str, object] = field(default_factory=dict)
    """The user's text for each path that is absolute in `config`, by dotted key."""

    def flat(self) -> dict[str, object]:
        """Every leaf by its dotted key, as plain values, and paths as they were written, so that a run that is moved,
        or submitted from another copy of its directory, keeps its settings."""
        flat = _leaves(self.config)
        return flat | {key: value for key, value in self.as_written.items() if key in flat}

    def redacted(self) -> dict[str, object]:
        """`flat` without secrets, for checkpoints and trackers."""
        return redacted_leaves(self.flat())


def compose_run(
    overrides: Sequence[str] | Typed, *, config_name: str, config_dir: Path | None = None, problems: Problems = STRICT
) -> Composed:
    """The checked, sealed configuration of `config_name` with overrides: texts of the command line, or settings.

    Raises `ConfigError` for invalid settings. With `problems` that collect, a setting that cannot be read is left out
    and reported there, as are broken rules.
    """
    directory = config_dir.resolve() if config_dir else config_directory()
    if not (directory / f"{config_name}.yaml").is_file():
        found = ", ".join(sorted(path.stem for path in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"There is no {config_name}.yaml in {directory}.", remedy=f"Configurations there: {found}.")
    typed = overrides if isinstance(overrides, Typed) else parse_overrides(overrides, problems)
    return _compose(_with_resumed_inputs(typed), config_name, directory, problems)


def _with_resumed_inputs(typed: Typed) -> Typed:
    """With `trainer.resume=RUN/checkpoints/step_5`, missing objects that RUN stored are those in its directory."""
    checkpoint = [str(setting.value) for setting in typed.settings if setting.key == "trainer.resume"][-1:]
    if checkpoint in ([], ["auto"], ["never"]):
        return typed
    run_dir = Path(checkpoint[0]).expanduser().parent.parent
    moved = [replace(s, value=found_in(run_dir, s.value, only_missing=True)) for s in typed.settings]
    return replace(typed, settings=moved)


def _compose(typed: Typed, config_name: str, directory: Path, problems: Problems) -> Composed:
    """Begins again without a setting whose interpolation cannot be resolved, once it is reported."""
    try:
        whole, in_files = read_files(config_name, directory, typed, {}, problems)
    except ConfigError as error:
        known = len(problems.found)
        typed = replace(typed, groups=_found_groups(config_name, directory, typed, problems))
        problems.add(*([error] if len(problems.found) == known else []))
        whole, in_files = read_files(config_name, directory, typed, {}, problems)
    user_keys = frozenset([*in_files, *(s.key for s in typed.settings if s.origin in OF_THE_USER)])
    places = {**in_files, **{setting.key: setting.place for setting in typed.settings}}
    own, described = Problems(collects=True), {}
    with own.caught("dataflow"):
        described = _described(whole, typed.settings)
    if described:
        whole, _ = read_files(config_name, directory, typed, described, problems)
    _drop_other_kinds(whole, typed.settings)
    before = _leaves(whole)
    apply_settings(whole, typed.settings, problems)
    try:
        config = OmegaConf.to_object(whole)
    except OmegaConfBaseException as error:
        path = str(error.full_key)
        key = max((k for k in user_keys if f"{path.replace('[', '.')}.".startswith(f"{k}.")), key=len, default=path)
        problem = wrong_value(key, error)
        if key in typed.unresolved:
            raise problem from error
        problems.add(located(problem, places.get(key)))
        rest = replace(typed, settings=[s for s in typed.settings if s.key != key], unresolved=typed.unresolved | {key})
        return _compose(rest, config_name, directory, problems)
    assert isinstance(config, Experiment), f"composed a {type(config)}"
    followed = _follow_batch_size(config, user_keys)
    check(config, own)
    _check_methods(config.algorithm, own)
    problems.add(*(located(error, places.get(error.key)) for error in own.found))
    followed |= _choose_kl_estimator(config)
    origins = _origins(before, whole, typed.settings, described) | followed
    as_written = with_absolute_paths(config)
    return Composed(sealed(config), origins, user_keys, config_name, as_written)


def _found_groups(config_name: str, directory: Path, typed: Typed, problems: Problems) -> dict[str, str]:
    """The choices that are there, without those that are not, each of which is reported."""
    found = {}
    for group, choice in typed.groups.items():
        with problems.caught(group), named_place(typed.places.get(group, "")):
            read_files(config_name, directory, replace(typed, groups={group: choice}), {}, problems)
            found[group] = choice
    return found


def _follow_batch_size(config: Experiment, user_keys: frozenset[str]) -> dict[str, str]:
    """Fits minibatch sizes of the package's own files to a batch size that the user gave: the largest divisor of the
    batch size that is not larger. Returns the origins of the sizes that changed."""
    if "data.batch_size" not in user_keys:
        return {}
    origins, batch_size = {}, config.data.batch_size
    for name, training in (("actor", config.actor), ("critic", config.critic)):
        key, size = f"{name}.minibatch_size", training.minibatch_size
        if key not in user_keys and size and batch_size > 0 and batch_size % size:
            training.minibatch_size = max(divisor for divisor in divisors(batch_size) if divisor <= size)
            origins[key] = "data.batch_size"
    return origins


def _choose_kl_estimator(config: Experiment) -> dict[str, str]:
    """Fills in the estimator that the placement of the divergence implies. Returns its origin if it was null."""
    kl = config.algorithm.kl
    if kl.placement is KLPlacement.none or kl.estimator is not None:
        return {}
    kl.estimator = kl.estimator_in_use
    return {"algorithm.kl.estimator": "algorithm.kl.placement"}


def _described(from_files: DictConfig, settings: Sequence[Setting]) -> dict[str, Role]:
    """The roles that the user's dataflow class describes, except those to which a file gives another kind.

    Raises `ConfigError` that names the class for anything but a mapping of roles to settings.
    """
    apply_settings(from_files, [setting for setting in settings if setting.key == "dataflow"], Problems(collects=True))
    dataflow = OmegaConf.select(from_files, "dataflow", throw_on_resolution_failure=False) or ""
    found = load_member(dataflow, key="dataflow") if is_own(dataflow) else None
    if not (isinstance(found, type) and issubclass(found, DescribesRoles)):
        return {}
    owner = f"dataflow={dataflow}: {found.__name__}.roles"
    if not isinstance(found.roles, Mapping):
        raise ConfigError(
            f"{owner} must be a mapping.", remedy='Write roles = {"name": {"kind": "reward_function", ...}}.'
        )
    roles = {name: _described_role(name, said, owner) for name, said in found.roles.items()}
    kinds, unsaid = _leaves(from_files.roles), Role().kind.name
    return {n: role for n, role in roles.items() if kinds.get(f"{n}.kind", unsaid) in (unsaid, role.kind.name)}


def _described_role(name: str, said: object, owner: str) -> Role:
    names = ", ".join(field.name for field in dataclass_fields(Role))
    if not isinstance(said, Mapping):
        raise ConfigError(f"{owner}['{name}'] must be a mapping.", remedy=f"Give it some of: {names}.")
    try:
        role = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Role), dict(said)))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "").partition("[")[0]
        hint = fields.find(key, Role)
        if hint is not None:
            problem = wrong_value(key, error, hint)
            raise ConfigError(f"{owner}['{name}'].{problem.message}", remedy=problem.remedy) from error
        known = [found.path for found in fields.keys(Role)]
        raise ConfigError(
            f"{owner}['{name}'] has no setting '{key}'.", remedy=f"{did_you_mean(key, known)}It may have: {names}."
        ) from error
    assert isinstance(role, Role), f"made a {type(role)}"
    return role


def _drop_other_kinds(config: DictConfig, settings: Sequence[Setting]) -> None:
    """Roles that get another kind start from its defaults, since their other settings belong to the previous kind."""
    written = _leaves({"roles": config.roles})
    changed = {setting.key for setting in settings if written.get(setting.key, setting.value) != setting.value}
    kept = {name: role for name, role in config.roles.items() if f"roles.{name}.kind" not in changed}
    if len(kept) < len(config.roles):
        config.roles = kept


def _check_methods(algorithm: Algorithm, problems: Problems) -> None:
    """The estimator and the losses must be in the catalogue, or be the user's own."""
    for key, name, known in (
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES),
        ("algorithm.policy_loss", algorithm.policy_loss, POLICY_LOSSES),
        ("algorithm.preference.loss", algorithm.preference.loss, PREFERENCE_LOSSES),
    ):
        with problems.caught(key):
            chosen(name, key, known)


def _origins(
    files: Mapping[str, object], whole: DictConfig, typed: Sequence[Setting], described: Mapping[str, Role]
) -> dict[str, str]:
    """The origin of each leaf's value; `files` are the leaves before run files and other settings of the user."""
    defaults = _leaves(Experiment(roles={str(name): Role() for name in whole.roles}))
    own = _leaves({"roles": described})
    origins = {}
    said = {setting.key: setting.origin for setting in typed}
    for leaf in _leaves(whole):
        above = [*accumulate(leaf.split("."), "{}.{}".format)]
        if found := [said[key] for key in above if key in said]:
            origins[leaf] = found[-1]
        elif leaf in files and (leaf not in defaults or defaults[leaf] != files[leaf]):
            origins[leaf] = "dataflow" if leaf in own and own[leaf] == files[leaf] else "file"
        else:
            origins[leaf] = "default"
    return origins


def plain(value: object) -> object:
    """A section, or a value in one, as dicts, lists and plain values; OmegaConf takes 0.1 s to convert a run's."""
    if isinstance(value, DictConfig):
        return OmegaConf.to_container(value, enum_to_str=True)
    if is_dataclass(value):
        return {key.name: plain(vars(value)[key.name]) for key in dataclass_fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _leaves(config: object) -> dict[str, object]:
    content = plain(config)
    assert isinstance(content, dict), f"a section became {type(content)}"
    return dict(leaves(content))
