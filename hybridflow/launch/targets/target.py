"""The settings of a target where runs are launched, from a file and from options."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.trainers import SUFFIXES
from hybridflow.launch.targets.texts import manifest_text, merged


class TargetKind(Enum):
    """The systems to which runs can be submitted."""

    local = "local"
    ray = "ray"
    slurm = "slurm"
    kuberay = "kuberay"
    skypilot = "skypilot"


_Read = Callable[[object, str], str | int | tuple[str, ...]]
_SECONDS = (86400, 3600, 60, 1)

_APPTAINER = ".sif"
_REQUEUES = {TargetKind.slurm: 20, TargetKind.kuberay: 3}
_MOUNT_FORMS = {
    TargetKind.slurm: (r"/[^:]*:/[^:]*(:[^:]+)?", "a directory and where it is mounted, such as /data:/data"),
    TargetKind.kuberay: (r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:/[^:]*", "a claim and where it is mounted: claim:/data"),
    TargetKind.skypilot: (r".+:/[^:]*", "a bucket or directory and where it is mounted, such as s3://bucket:/data"),
}


def _text(value: object, where: str, wanted: str = "one line of printable characters") -> str:
    if isinstance(value, str) and value.isprintable() and value.strip():
        return value
    raise _wrong(where, value, wanted)


def _word(value: object, where: str) -> str:
    """The rule for every value whose option does not say otherwise."""
    wanted = "one word of printable characters, without quotes"
    if re.search(r"[\s'\"\\]", text := _text(value, where, wanted)):
        raise _wrong(where, value, wanted)
    return text


def _texts(value: object, where: str) -> tuple[str, ...]:
    """Texts that may have several lines."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        raise _wrong(where, value, "a text")
    texts = [each.strip() if isinstance(each, str) else "" for each in values]
    for each, text in zip(values, texts, strict=True):
        if not text or not text.replace("\n", "").replace("\t", "").isprintable():
            raise _wrong(where, each, "a text of printable characters")
    return tuple(texts)


def _whole(value: object, where: str, wanted: str = "a whole number, such as 64") -> int:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}", value):
        raise _wrong(where, value, wanted)
    return int(value)


def _count(value: object, where: str) -> int:
    wanted = "a whole number above 0, such as 64"
    if number := _whole(value, where, wanted):
        return number
    raise _wrong(where, value, wanted)


def _matching(form: str, wanted: str) -> _Read:
    """A reader of texts of a form, a regular expression."""

    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(form, value):
            raise _wrong(where, value, wanted)
        return value

    return read


_time = _matching(r"([0-9]{1,4}-)?[0-9]{1,2}:[0-5][0-9]:[0-5][0-9]", "a time: HH:MM:SS or DAYS-HH:MM:SS")
_memory = _matching(r"[1-9][0-9]{0,6}[GT]", "an amount of memory per node, such as 512G")
_name = _matching(
    r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", "a name of lowercase letters, digits and dashes, of at most 47 characters"
)


def _mounts(value: object, where: str) -> tuple[str, ...]:
    mounts = tuple(_word(mount, where) for mount in (value if isinstance(value, list) else [value]))
    for mount in mounts:
        if not re.fullmatch(r"[^,]+:/[^/,][^,]*", mount):  # pyxis and Apptainer divide their mounts at commas
            raise _wrong(where, mount, "SOURCE:DIRECTORY without commas, with an absolute directory: /data:/data")
    return mounts


def _variables(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, dict):
        texts = {name: _text(f"{name}={text}", where) for name, text in value.items() if isinstance(text, str)}
        for name in value.keys() - texts:
            raise _wrong(f"{where}: {name}", value[name], "a text")
        value = [*texts.values()]
    wanted = "NAME=VALUE, on one line of printable characters"
    pairs = tuple(_text(pair, where, wanted) for pair in (value if isinstance(value, list) else [value]))
    for pair in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", pair):
            raise _wrong(where, pair, wanted)
    return pairs


def _names(value: object, where: str) -> tuple[str, ...]:
    names = _texts(value, where)
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][-.\w]*", name):
            raise _wrong(where, name, "a name, without a value")
    return names


def _option(form: str, about: str, read: _Read, *kinds: TargetKind, default: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"form": form, "about": about, "read": read, "kinds": kinds})


_SLURM, _KUBERAY, _SKYPILOT, _RAY = TargetKind.slurm, TargetKind.kuberay, TargetKind.skypilot, TargetKind.ray


@dataclass(frozen=True)
class Target:
    """A target and its settings. The same names are options of `hybridflow launch` and keys of a target file."""

    kind: TargetKind
    name: str | None = _option("NAME", "name of the job", _name, _RAY, _SLURM, _KUBERAY, _SKYPILOT)
    address: str | None = _option("URL", "address of Ray's job server, such as http://head:8265", _word, _RAY)
    requirements: str | None = _option("FILE", "requirements file that Ray installs for the job", _text, _RAY)
    partition: str | None = _option("NAME", "partition of the job", _word, _SLURM)
    account: str | None = _option("NAME", "account that is charged", _word, _SLURM)
    time: str | None = _option("HH:MM:SS", "time limit, also DAYS-HH:MM:SS", _time, _SLURM, _KUBERAY)
    gpu: str | None = _option("KIND", "kind of GPU, such as H100", _word, _SLURM, _SKYPILOT)
    cpus: int | None = _option("N", "CPU cores per node", _count, _SLURM, _KUBERAY, _SKYPILOT)
    memory: str | None = _option("512G", "memory per node, such as 512G", _memory, _SLURM, _KUBERAY, _SKYPILOT)
    image: str | None = _option(
        "IMAGE",
        "container image; on Slurm one of pyxis, or a .sif file of Apptainer",
        _word,
        _SLURM,
        _KUBERAY,
        _SKYPILOT,
    )
    mount: tuple[str, ...] = _option(
        "SOURCE:DIRECTORY",
        "storage on every node; SOURCE: a directory (slurm), a volume claim (kuberay), a bucket (skypilot)",
        _mounts, _SLURM, _KUBERAY, _SKYPILOT, default=(),
    )  # fmt: skip
    directory: str | None = _option(
        "DIRECTORY", "directory in which the run starts (default: this one; on kuberay, that of the image)",
        _text, _SLURM, _KUBERAY,
    )  # fmt: skip
    setup: tuple[str, ...] = _option(
        "COMMAND", "shell command before the run, such as 'source .venv/bin/activate'",
        _texts, _SLURM, _KUBERAY, _SKYPILOT, default=(),
    )  # fmt: skip
    env: tuple[str, ...] = _option(
        "NAME=VALUE", "environment variable", _variables, _RAY, _SLURM, _KUBERAY, _SKYPILOT, default=()
    )
    secret: tuple[str, ...] = _option(
        "NAME",
        "environment variable with the value that it has here, which is not written down; on kuberay, a Secret",
        _names, _SLURM, _KUBERAY, _SKYPILOT, default=(),
    )  # fmt: skip
    requeues: int | None = _option(
        "N",
        f"starts after the first: after a notice or a lost node (slurm, default {_REQUEUES[_SLURM]}), or a failure"
        f" (kuberay, default {_REQUEUES[_KUBERAY]})",
        _whole, _SLURM, _KUBERAY,
    )  # fmt: skip
    line: tuple[str, ...] = _option(
        "TEXT",
        "passed on: an option of sbatch, or YAML for the manifest (kuberay), task (skypilot) or runtime env (ray)",
        _texts, _RAY, _SLURM, _KUBERAY, _SKYPILOT, default=(),
    )  # fmt: skip

    @property
    def most_requeues(self) -> int:
        """How often the job may start again."""
        return _REQUEUES.get(self.kind, 0) if self.requeues is None else self.requeues

    @property
    def uses_pyxis(self) -> bool:
        """Whether Slurm starts each step in a container of its own."""
        return self.kind is TargetKind.slurm and self.image is not None and not self.image.endswith(_APPTAINER)

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        if self.time is None:
            return None
        days, _, clock = self.time.rpartition("-")
        parts = [int(days or 0), *(int(part) for part in clock.split(":"))]
        return sum(number * unit for number, unit in zip(parts, _SECONDS, strict=True))

    @property
    def gigabytes(self) -> int | None:
        """The memory per node."""
        return None if self.memory is None else int(self.memory[:-1]) * (1024 if self.memory[-1] == "T" else 1)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables."""
        return dict(pair.split("=", 1) for pair in self.env)

    @property
    def merged(self) -> dict[str, object]:
        """The lines as YAML, one after another, which targets with a manifest merge into it."""
        return reduce(merged, (_plain_yaml(line, f"--line of {self.kind.value}") for line in self.line), {})


OPTIONS: tuple[Field, ...] = tuple(option for option in fields(Target) if option.metadata)
"""The settings of all targets; the metadata of each say what it is and which targets have it."""


def read_target(on: str, given: Mapping[str, object]) -> Target:
    """The target that `--on` names: one of the kinds, or a YAML file with `target: KIND` and settings.

    `given` are the options of the command line, which win over the file; lists are joined.
    """
    in_file: dict[str, object] = {}
    kind, where = on, "--on"
    if Path(on).suffix in SUFFIXES:
        in_file = _content(Path(on))
        kind, where = str(in_file.pop("target", None) or ""), f"{on}: target"
    known = [each.value for each in TargetKind]
    if kind not in known:
        found = f"{where} is missing" if not kind else f"{where}={kind} is not a target"
        raise ConfigError(
            f"{found}.",
            remedy=f"{did_you_mean(kind, known)}Use {', '.join(known)}, or a file that says target: slurm.",
        )
    target = Target(TargetKind(kind))
    target = _with(target, in_file, lambda name: f"{on}: {name}")
    target = _with(target, given, lambda name: f"--{name}")
    _check_forms(target)
    return target


def _check_forms(target: Target) -> None:
    """Raises `ConfigError` for lines and mounts that do not have the form that the kind of target needs."""
    on = f"of {target.kind.value}"
    for line in target.line if target.kind is _SLURM else ():
        if not re.fullmatch(r"(#SBATCH )?-.+", line) or not line.isprintable():
            raise _wrong(f"--line {on}", line, "an option of sbatch on one line, such as --qos=high")
    if target.kind is not _SLURM:
        _ = target.merged
    form, wanted = _MOUNT_FORMS.get(target.kind, ("", ""))
    for mount in target.mount:
        if not re.fullmatch(form, mount):
            raise _wrong(f"--mount {on}", mount, wanted)


def _with(target: Target, settings: Mapping[str, object], where: Callable[[str], str]) -> Target:
    options = {option.name: option for option in OPTIONS}
    values: dict[str, object] = {}
    for name, value in settings.items():
        if name not in options:
            of_kind = [option.name for option in OPTIONS if target.kind in option.metadata["kinds"]]
            raise ConfigError(
                f"{where(name)} is not a setting of a target.",
                remedy=f"{did_you_mean(name, of_kind)}Settings of {target.kind.value}: {', '.join(of_kind) or 'none'}.",
            )
        kinds = options[name].metadata["kinds"]
        if target.kind not in kinds:
            raise ConfigError(
                f"{where(name)} does not apply to {target.kind.value}, only to"
                f" {', '.join(kind.value for kind in kinds)}.",
                remedy="Leave it out.",
            )
        if name == "line" and isinstance(value, dict):
            value = [manifest_text(value)]
        read = options[name].metadata["read"](value, where(name))
        before = vars(target)[name]
        values[name] = (*before, *read) if isinstance(read, tuple) else read
    return replace(target, **values)


def _content(file: Path) -> dict[str, object]:
    """The settings of a target file; every value is the text that was written, so that 04:00:00 stays a time."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--on {file}: the file cannot be read: {error}.", remedy="Give the path of a YAML file, or a target."
        ) from error
    content = _yaml(text, str(file), _Texts)
    if isinstance(content.get("line"), dict):  # YAML of the target itself, with its own types
        content["line"] = _plain_yaml(text, str(file))["line"]
    return content


def _plain_yaml(text: str, where: str) -> dict[str, object]:
    """A mapping of YAML with values that JSON has too, as manifests do."""
    content = _yaml(text, where, yaml.SafeLoader)
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} has a value that is neither text, number, truth value, list nor mapping.",
            remedy="Quote it if it is a text, such as the date '2020-01-01'.",
        ) from error
    return content


class _Texts(yaml.BaseLoader):
    """Reads every value but null as the text that was written."""


_Texts.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)


def _yaml(text: str, where: str, loader: type[yaml.BaseLoader | yaml.SafeLoader]) -> dict[str, object]:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        _check_written_once(node, where, set())
        content = None if node is None else loader("").construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45
        problem = " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML: {problem}.", remedy="Correct it.") from error
    if content is None or content == "":
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _wrong(where, content, "a mapping, such as 'key: value'")
    return content


def _check_written_once(node: yaml.Node | None, where: str, before: set[int]) -> None:
    """Raises `ConfigError` for a key that is there twice, and for aliases, which may contain themselves."""
    if not isinstance(node, yaml.CollectionNode):
        return
    if id(node) in before:
        raise ConfigError(f"{where} has an alias (*name).", remedy="Write its values instead.")
    before.add(id(node))
    keys: set[str] = set()
    for item in node.value:
        key, value = item if isinstance(item, tuple) else (None, item)
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                raise ConfigError(f"{where} has {key.value} twice.", remedy="Remove one of the two.")
            keys.add(key.value)
        _check_written_once(value, where, before)


def _wrong(where: str, value: object, wanted: str) -> ConfigError:
    text = "null" if value is None else str(value)
    shown = text if text.isprintable() else repr(text)
    return ConfigError(f"{where}={shown[:200]} is not {wanted}.", remedy=f"Give {wanted}.")
