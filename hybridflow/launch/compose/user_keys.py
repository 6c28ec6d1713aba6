"""What a user's own files say, apart from the package's that they build on."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from hybridflow.config.schema import config_directory

_GLOBAL_PACKAGE = "# @package _global_"


def leaves_in_files(file: Path, groups: Mapping[str, str], *, section: str = "") -> Iterator[tuple[str, object]]:
    """The keys and values in a configuration of the user's, and in those of its directory that it builds on.

    `groups` are the choices of the command line, which come before the file's. Nothing for a file of the package.
    """
    if file.parent.is_relative_to(config_directory()) or not file.is_file():
        return
    text = file.read_text()
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        return
    prefix = "" if text.startswith(_GLOBAL_PACKAGE) else section
    yield from _leaves({name: value for name, value in content.items() if name not in ("defaults", "hydra")}, prefix)
    for entry in content.get("defaults") or []:
        if isinstance(entry, dict):
            for key, choice in entry.items():
                group = str(key).removeprefix("override ").strip("/")
                chosen = file.parent / group / f"{groups.get(group, choice)}.yaml"
                yield from leaves_in_files(chosen, groups, section=group.replace("/", "."))
        else:
            yield from leaves_in_files(file.parent / f"{entry}.yaml", groups)


def _leaves(content: Mapping[object, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value
