"""Settings and manifests as YAML from which every text is read back as the same text."""

import re

import yaml

_NUMBER = re.compile(r"[-+.0-9][-+.:_0-9eEoO]*")
"""Anything that a reader may take for a number: 1e3 is one for OmegaConf, but not for PyYAML, which itself quotes only
those that it knows."""

_TRUTH_VALUES = ("y", "Y", "n", "N")
"""Those of YAML 1.1 that Kubernetes knows and PyYAML does not; PyYAML itself quotes the others."""


class _Dumper(yaml.SafeDumper):
    """Quotes texts that another reader may take for a number or a truth value, or that have special characters."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class _BlockDumper(_Dumper):
    """Writes texts of several lines as blocks."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_safe = text.isprintable() and not _NUMBER.fullmatch(text) and text not in _TRUTH_VALUES
    return dumper.represent_str(text) if is_safe else dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and text.replace("\n", "").isprintable():
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    return _quoted(dumper, text)


_Dumper.add_representer(str, _quoted)
_BlockDumper.add_representer(str, _block)


def yaml_text(content: object, *, has_blocks: bool = False) -> str:
    """Plain values as YAML, each on one line; with `has_blocks`, texts of several lines are readable blocks."""
    dumper = _BlockDumper if has_blocks else _Dumper
    return yaml.dump(content, Dumper=dumper, sort_keys=False, width=float("inf"), allow_unicode=True)
