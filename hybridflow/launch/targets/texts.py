"""The texts of scripts and manifests."""

import shlex
from collections.abc import Mapping

from hybridflow.launch.compose.yaml_text import yaml_text


def merged(content: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """A mapping with another's values; mappings within are merged, other values replaced."""
    result = dict(content)
    for key, value in more.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def variable(name: str, text: str) -> str:
    """A variable of a shell script with a text as it is, which may have quotes and lines."""
    return f"{name}={shlex.quote(text)}"


def manifest_text(content: object) -> str:
    """A manifest as YAML."""
    return yaml_text(content, has_blocks=True)
