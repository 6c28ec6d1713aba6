"""How many settings of verl's example scripts have a counterpart in hybridflow, and which have none.

    python benchmarks/translated_commands.py

Translates the overrides in `benchmarks/published/verl_overrides.yaml`, and composes each run. Takes seconds, and needs
neither models nor data.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hybridflow.config.experiment import Experiment
from hybridflow.errors import Problems
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.other_systems.commands import TranslatedCommand, translated_text
from hybridflow.launch.compose.trainers import known_command
from hybridflow.launch.rules.parallelism import parallelism_problems
from hybridflow.observability.formatting import columns

_LISTS = Path(__file__).resolve().parent / "published" / "verl_overrides.yaml"
_COLUMNS = ("script", "algorithm", "model", "settings", "translated", "not needed", "missing", "composes")


@dataclass(frozen=True)
class Example:
    """One example script of verl, translated."""

    said: Mapping[str, str]
    num_settings: int
    command: TranslatedCommand
    config: Experiment
    problems: list[str]
    """Errors of the translated settings."""

    @property
    def missing(self) -> list[str]:
        """The settings without a counterpart, as typed."""
        return [missing.name for missing in self.command.found.missing]

    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        not_needed = sum(len(each.names) for each in self.command.found.not_needed)
        counts = (self.num_settings, self.num_settings - not_needed - len(self.missing), not_needed, len(self.missing))
        script = self.said["source"].split()[1].removeprefix("examples/")
        composes = "no" if self.problems else "yes"
        return (script, self.said["algorithm"], self.said["model"], *map(str, counts), composes)


def quickstart() -> str:
    """The overrides of verl's quickstart."""
    return yaml.safe_load(_LISTS.read_text(encoding="utf-8"))[0]["words"]


def examples() -> Iterator[Example]:
    """Every script, translated and composed."""
    for said in yaml.safe_load(_LISTS.read_text(encoding="utf-8")):
        (command,) = translated_text(f"python3 -m verl.trainer.main_ppo {said['words']}", os.environ)
        problems, here = Problems(collects=True), known_command(command.word)
        composed = compose_run([*here.overrides, *command.overrides()], config_name=here.trainer, problems=problems)
        problems.check([parallelism_problems], composed.config)
        count = sum("=" in word and not word.startswith("--") for word in said["words"].split())
        yield Example(said, count, command, composed.config, [str(error) for error in problems.found])


def table(found: Sequence[Example]) -> str:
    """One line per script, then each missing setting with what to do instead, and what hybridflow rejects."""
    lines = columns([_COLUMNS, *(example.row() for example in found)])
    reasons: dict[str, str] = {}
    for example in found:
        reasons |= {missing.name: missing.reason for missing in example.command.found.missing}
    lines += ["", "missing:", *(f"  {name}: {reason}" for name, reason in sorted(reasons.items()))]
    lines += [problem for example in found for problem in example.problems]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints the table."""
    sys.stdout.write(table([*examples()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
