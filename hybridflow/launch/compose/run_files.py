"""Run files: YAML files of the settings that differ from the defaults, checked as the command line is.

    command: grpo                         # `hybridflow run FILE` runs this; `hybridflow ppo FILE` may
    extends: base.yaml                    # or a list; relative to this file
    algorithm.kl.placement: loss          # keys are dotted, nested, or both
    trainer: {epochs: 3}

A later file wins over an earlier one, a file over those that it extends, and the command line over all files. The
`config.yaml` of a run is a run file too: in the run's directory, which may have been moved, it continues the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from hybridflow.config import fields
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import user_path
from hybridflow.config.section import ORIGIN
from hybridflow.config.stored_inputs import found_in
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.compose.files import file_content, file_nodes
from hybridflow.launch.compose.overrides import (
    OF_THE_USER,
    RECORD,
    RUN_FILE,
    Setting,
    Typed,
    named_place,
    parse_overrides,
    settings_of,
)
from hybridflow.launch.compose.presets import GROUPS
from hybridflow.launch.compose.trainers import PURPOSES, SUFFIXES, TrainingCommand, known_command, shown_name
from hybridflow.observability.redaction import REDACTED

COMMAND, EXTENDS = "command", "extends"

_COMPUTED = ("device", "plan", "trainer.total_steps", "trainer.epochs", RECORD)
"""Origins of values in a run's record that a run computes again, for its own devices, length and place."""

_OF_A_RUN = ("checkpoints", "run.log")


@dataclass(frozen=True)
class RunFiles:
    """The contents of some run files together, as if typed."""

    typed: Typed = field(default_factory=lambda: Typed({}, []))
    command: TrainingCommand | None = None
    """The command that they are for, if one says so."""

    command_place: str = ""
    """The file and line that says so."""


def read_run_files(files: Sequence[Path], problems: Problems = STRICT) -> RunFiles:
    """The settings of run files, one after another. Adds a `ConfigError` for each that is unknown or has no form that
    its key takes, and for files that cannot be read."""
    found = _read_all(files, problems)
    return replace(found, typed=_implied(found).followed_by(found.typed))


def with_files(
    files: Sequence[Path], overrides: Sequence[str], *, config_name: str, problems: Problems = STRICT
) -> Typed:
    """The settings of run files and of the command line, which wins.

    Adds a `ConfigError` for a file that is for another command, and for secrets that only a run's record holds.
    """
    found = _read_all(files, problems)
    typed = found.typed
    if found.command is not None and config_name in PURPOSES and found.command.trainer != config_name:
        with problems.caught(), named_place(found.command_place):
            raise ConfigError(
                f"this file is for hybridflow {found.command.word}, not hybridflow {shown_name(config_name)}.",
                remedy=f"Use hybridflow run {' '.join(map(str, files))}.",
            )
    else:
        typed = _implied(found).followed_by(typed)
    typed = typed.followed_by(parse_overrides(overrides, problems))
    problems.add(*_hidden(typed.settings))
    return typed


def _read_all(files: Sequence[Path], problems: Problems) -> RunFiles:
    """The contents of run files, without the choices that their command implies."""
    found = RunFiles()
    for file in files:
        with problems.caught():
            found = _joined(found, _read(file, problems, ()))
    return found


def _hidden(settings: Sequence[Setting]) -> list[ConfigError]:
    """Secrets that a run's record hides, and that nothing after it gives."""
    last = {setting.key: setting for setting in settings}
    return [
        ConfigError(
            f"{setting.place}: {setting.key} is a secret, and config.yaml does not store secrets.",
            remedy=f"Add it to the command: {setting.key}=...",
        )
        for setting in last.values()
        if setting.place and REDACTED in str(setting.value)
    ]


def _read(file: Path, problems: Problems, above: tuple[Path, ...]) -> RunFiles:
    """One file after those that it extends. `above` are the files that extend it."""
    file = user_path(str(file))
    if not file.is_file():
        near = [path.name for path in file.parent.glob("*") if path.suffix in SUFFIXES and path.is_file()]
        raise ConfigError(
            f"There is no file '{file}'.",
            remedy=f"{did_you_mean(file.name, near, are_files=True)}Give the path of a run file,"
            f" relative to {Path.cwd()}.",
        )
    if file.resolve() in above:
        raise ConfigError(f"{file} extends itself.", remedy=f"Remove it from {EXTENDS} in {above[-1]}.")
    page, content = _Page(file), file_content(file)
    if "defaults" in content:
        raise ConfigError(
            f"{page.place('defaults')}: 'defaults' belongs to Hydra's configurations, not to run files.",
            remedy=f"Write '{EXTENDS}: FILE', or run it with --config-dir {file.parent} --config-name {file.stem}.",
        )
    problems.add(*page.repeated)
    found = RunFiles()
    for name in _names(content.pop(EXTENDS, []), page):
        found = _joined(found, _read(file.parent / user_path(name), problems, (*above, file.resolve())))
    own = RunFiles()
    if COMMAND in content:
        with problems.caught(), named_place(page.place(COMMAND)):
            own = RunFiles(command=known_command(str(content[COMMAND])), command_place=page.place(COMMAND))
    typed = _typed({name: value for name, value in content.items() if name != COMMAND}, page, problems)
    if page.is_of_run:
        settings = [replace(setting, value=found_in(file.parent, setting.value)) for setting in typed.settings]
        typed = replace(typed, settings=[*settings, *_continued(settings, file.parent.absolute())])
    return _joined(found, replace(own, typed=typed))


def _continued(settings: Sequence[Setting], directory: Path) -> list[Setting]:
    """The directory of a run that its record does not lead to, because it was moved, or the current one is another."""
    recorded = {setting.key: setting.value for setting in settings}
    written = recorded.get("trainer.run_dir") or Path("runs", str(recorded.get("trainer.experiment")))
    is_there = user_path(str(written)).absolute() == directory
    return [] if is_there else [Setting("trainer.run_dir", str(directory), origin=RECORD)]


def _typed(content: Mapping[str, object], page: "_Page", problems: Problems) -> Typed:
    typed = Typed({}, [])
    for key, value in content.items():
        if key in GROUPS and not isinstance(value, Mapping):
            with problems.caught(), named_place(page.place(key)):
                if not isinstance(value, str):
                    raise ConfigError(f"{key}={value} is not a single {key} name.", remedy=f"Write {key}: NAME.")
                typed = typed.followed_by(Typed({key: value}, [], places={key: page.place(key)}))
        else:
            found = [
                page.of_record(page.as_written(setting))
                for setting in settings_of(str(key), value, problems, page.place, origin=RUN_FILE)
            ]
            typed = typed.followed_by(Typed({}, [setting for setting in found if setting.origin not in _COMPUTED]))
    return typed


def _names(value: object, page: "_Page") -> list[str]:
    wanted = value if isinstance(value, list) else [value]
    names = [name for name in wanted if isinstance(name, str)]
    if len(names) < len(wanted):
        raise ConfigError(
            f"{page.place(EXTENDS)}: {EXTENDS} must name files.", remedy=f"Write {EXTENDS}: FILE, or [FILE, FILE]."
        )
    return names


def _joined(first: RunFiles, second: RunFiles) -> RunFiles:
    if first.command is not None and second.command is not None and first.command.trainer != second.command.trainer:
        earlier, later = (shown_name(found.command.trainer) for found in (first, second) if found.command is not None)
        raise ConfigError(
            f"{second.command_place}: this file is for hybridflow {later}, but {first.command_place} is for hybridflow"
            f" {earlier}.",
            remedy=f"Use settings for one of them, or move those for both to a file without '{COMMAND}'.",
        )
    last = first if second.command is None else second
    return RunFiles(first.typed.followed_by(second.typed), last.command, last.command_place)


def _implied(found: RunFiles) -> Typed:
    """The choices that the command of the files implies, such as `algorithm=grpo`."""
    if found.command is None:
        return Typed({}, [])
    implied = parse_overrides(found.command.overrides)
    settings = [replace(setting, place=found.command_place, origin=RUN_FILE) for setting in implied.settings]
    return Typed(implied.groups, settings, places=dict.fromkeys(implied.groups, found.command_place))


class _Page:
    """The lines of a file: where each key is, and the origins that a run's record gives to its values."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._numbers: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self.repeated: list[ConfigError] = []
        """An error for each setting that the file has nested and dotted, so that one of its values would not count."""

        self._note(file_nodes(file), "")
        self._lines = file.read_text(encoding="utf-8").splitlines()
        self._is_record = any(ORIGIN in line for line in self._lines)
        self.is_of_run = self._is_record and any((file.parent / name).exists() for name in _OF_A_RUN)
        """Whether it is the record of a run, in the run's directory."""

    def place(self, key: str) -> str:
        """`run.yaml, line 3`; without the line for a key that an alias brings."""
        number = self._numbers.get(key)
        return str(self._file) if number is None else f"{self._file}, line {number}"

    def as_written(self, setting: Setting) -> Setting:
        """A text that YAML takes for another value, such as `no`, `0123` or `1:30`, as the file has it."""
        if (
            fields.is_text(fields.find(setting.key))
            and isinstance(setting.value, bool | int | float)
            and setting.key in self._texts
        ):
            return replace(setting, value=self._texts[setting.key])
        return setting

    def of_record(self, setting: Setting) -> Setting:
        """A setting of a run's record with the origin that it had there; what the user set is in a run file now."""
        if not self._is_record or setting.key not in self._numbers:
            return setting
        noted = self._lines[self._numbers[setting.key] - 1].partition(ORIGIN)[2].partition(";")[0]
        if noted == fields.AUTO:
            key, value = fields.meant(setting.key, fields.AUTO)
            return replace(setting, key=key, value=value, origin=RUN_FILE)
        return replace(setting, origin=RUN_FILE if noted in ("", *OF_THE_USER) else noted)

    def _note(self, node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in self._numbers and not (isinstance(value, yaml.MappingNode) and value.value):
                    first = self._numbers[name]
                    words = f"{self._file}, line {line}: {name} is set in line {first} already."
                    self.repeated.append(ConfigError(words, remedy="Remove one of the two."))
                self._numbers[name] = line
                if isinstance(value, yaml.ScalarNode):
                    self._texts[name] = value.value
                self._note(value, f"{name}.")
