"""The texts of scripts and manifests."""

from collections.abc import Mapping

import yaml


def merged(content: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """A mapping with another's values; mappings within are merged, other values replaced."""
    result = dict(content)
    for key, value in more.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def variable(name: str, text: str) -> str:
    """A variable of a shell script with a text as it is, which may have quotes and lines."""
    if not text:
        return f"{name}=''"
    return f"{name}=$(cat <<'END_OF_TEXT'\n{text}\nEND_OF_TEXT\n)"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifest_text(content: object) -> str:
    """A manifest as YAML."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000)
