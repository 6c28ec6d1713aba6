"""The words of a training command: options, run files, and settings."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hybridflow.config import fields
from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.compose.overrides import Typed, suggestion
from hybridflow.launch.compose.run_files import COMMAND, read_run_files, with_files
from hybridflow.launch.compose.trainers import JOBS, OPTIONS, TrainingCommand, is_run_file

_WITHOUT_DASHES = "Settings are written key=value, without dashes; see --help."


@dataclass(frozen=True)
class CommandLine:
    """A training command as typed. `topics` are the settings that `--help` is asked for."""

    overrides: list[str]
    files: list[Path]
    config_name: str
    config_dir: Path | None = None
    cfg: str | None = None
    dry_run: bool = False
    multirun: bool = False
    jobs: str = JOBS[0]
    help: bool = False
    topics: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Options that do not exist; with `dry_run`, they are problems among others."""

    is_unnamed: bool = False
    """Whether neither the command line nor a run file names a command, as in `hybridflow run --help`."""

    def typed(self, problems: Problems = STRICT) -> Typed:
        """The settings of its run files, and then its own."""
        problems.add(*map(no_option, self.unknown))
        return with_files(self.files, self.overrides, config_name=self.config_name, problems=problems)


def parse_command_line(argv: Sequence[str], *, program: str, command: TrainingCommand | None) -> CommandLine:
    """The words after a training command. Without a command, the run files name it."""
    if isinstance(argv, str | Mapping) or not all(isinstance(word, str) for word in argv):
        raise ConfigError(
            f"The words of {program} are of type {type(argv).__name__}, not a list of text.",
            remedy='Write ["trainer.total_steps=1"]. For settings as a mapping, and for objects, use hybridflow.run.',
        )
    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--jobs", choices=JOBS)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp", type=Path)
    parser.add_argument("words", nargs="*")
    try:
        known, left = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{str(error).removeprefix('argument ')}.", remedy=_WITHOUT_DASHES) from error
    unknown = [word for word in left if word.startswith("-")]
    known.words += [word for word in left if word not in unknown]
    if unknown and not (known.dry_run and not known.multirun):
        raise no_option(unknown[0])
    for word, value in pairwise(argv):  # an unknown option and its value
        if word in unknown and "=" not in word and value in known.words and "=" not in value and not is_run_file(value):
            known.words.remove(value)
    if known.jobs is not None and not known.multirun:
        raise ConfigError(f"--jobs={known.jobs} is for sweeps.", remedy="Add --multirun, or leave --jobs out.")
    files = [Path(word) for word in known.words if is_run_file(word)]
    topics = [word for word in known.words if known.help and "=" not in word and not is_run_file(word)]
    settings = [word for word in known.words if not is_run_file(word) and word not in topics]
    is_unnamed = command is None and not files
    command = _command_of(files, settings, is_help=known.help) if command is None else command
    return CommandLine(
        overrides=[*command.overrides, *settings],
        files=files,
        config_name=known.config_name or command.trainer,
        config_dir=known.config_dir,
        cfg=known.cfg,
        dry_run=known.dry_run,
        multirun=known.multirun,
        jobs=known.jobs or JOBS[0],
        help=known.help,
        topics=tuple(topics),
        unknown=tuple(unknown),
        is_unnamed=is_unnamed,
    )


def _command_of(files: Sequence[Path], others: Sequence[str], *, is_help: bool) -> TrainingCommand:
    """The trainer that run files name. What its algorithm implies, and other errors, are found when they are read."""
    if is_help and not files:
        return TrainingCommand("ppo")
    if not files:
        found = f"'{others[0]}' is not a run file" if others else "There is no run file"
        raise ConfigError(f"{found}.", remedy="Write hybridflow run FILE.yaml, or hybridflow ppo.")
    problems = Problems(collects=True)
    found = read_run_files(files, problems).command
    if found is None:
        STRICT.add(*problems.found)
        names = ", ".join(map(str, files))
        raise ConfigError(
            f"{names} names no command.",
            remedy=f"Add a line such as '{COMMAND}: grpo' to it, or write hybridflow grpo {files[0]}.",
        )
    return TrainingCommand(found.trainer)


def no_option(word: str, options: Sequence[str] = OPTIONS) -> ConfigError:
    """The error for an option that is none of these; it may be a setting, here or elsewhere."""
    key, equals, value = word.lstrip("-").partition("=")
    if fields.find(key) is None:
        remedy = f"{suggestion(key) or did_you_mean(word.partition('=')[0], options)}{_WITHOUT_DASHES}"
    else:
        written = f"{key}={value if equals else 'VALUE'}"
        remedy = f"Settings are written key=value, without dashes: {written}; see --help."
    return ConfigError(f"There is no option {word}.", remedy=remedy)
