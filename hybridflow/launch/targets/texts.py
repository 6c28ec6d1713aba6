"""The texts of scripts and manifests."""

import shlex
from collections.abc import Mapping

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.yaml_text import yaml_text


def merged(content: Mapping[str, object], more: Mapping[str, object], *, path: str = "") -> dict[str, object]:
    """A mapping with another's values; mappings within are merged, other values replaced.

    Raises `ConfigError` if a mapping or a list would be replaced by something else.
    """
    result = dict(content)
    for key, value in more.items():
        before, place = result.get(key), f"{path}.{key}" if path else key
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(before, value, path=place)
        elif value is not None and isinstance(before, Mapping | list) and not isinstance(value, type(before)):
            kind = "mapping" if isinstance(before, Mapping) else "list"
            raise ConfigError(
                f"--line gives {place} the value {str(value)[:200]}, but there it is a {kind}.",
                remedy=f"Give a {kind}, or null to leave it out.",
            )
        result[key] = value
    return result


def variable(name: str, text: str) -> str:
    """A variable of a shell script with a text as it is, which may have quotes and lines."""
    return f"{name}={shlex.quote(text)}"


def manifest_text(content: object) -> str:
    """A manifest as YAML."""
    return yaml_text(content, has_blocks=True)
