"""The settings of a target where runs are launched, from a file and from options."""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.trainers import SUFFIXES


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


def _text(value: object, where: str) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise _wrong(where, value, "a text")


def _texts(value: object, where: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_text(each, where) for each in values)


def _count(value: object, where: str) -> int:
    if not isinstance(value, str) or not value.isdigit():
        raise _wrong(where, value, "a whole number, such as 64")
    return int(value)


def _time(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d", value):
        raise _wrong(where, value, "a time: HH:MM:SS or DAYS-HH:MM:SS")
    return value


def _memory(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\d+[GT]", value):
        raise _wrong(where, value, "an amount of memory per node, such as 512G")
    return value


def _mounts(value: object, where: str) -> tuple[str, ...]:
    mounts = _texts(value, where)
    for mount in mounts:
        if not all(mount.partition(":")[::2]):
            raise _wrong(where, mount, "SOURCE:DIRECTORY, such as /data:/data")
    return mounts


def _variables(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, dict):
        value = [f"{name}={text}" for name, text in value.items()]
    pairs = _texts(value, where)
    for pair in pairs:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", pair):
            raise _wrong(where, pair, "NAME=VALUE, on one line")
    return pairs


def _names(value: object, where: str) -> tuple[str, ...]:
    names = _texts(value, where)
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][-.\w]*", name):
            raise _wrong(where, name, "a name, without a value")
    return names


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", value):
        raise _wrong(where, value, "a name of lowercase letters, digits and dashes, of at most 47 characters")
    return value


def _option(form: str, about: str, read: _Read, *kinds: TargetKind, default: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"form": form, "about": about, "read": read, "kinds": kinds})


_SLURM, _KUBERAY, _SKYPILOT, _RAY = TargetKind.slurm, TargetKind.kuberay, TargetKind.skypilot, TargetKind.ray


@dataclass(frozen=True)
class Target:
    """A target and its settings. The same names are options of `hybridflow launch` and keys of a target file."""

    kind: TargetKind
    name: str | None = _option("NAME", "name of the job", _name, _RAY, _SLURM, _KUBERAY, _SKYPILOT)
    address: str | None = _option("URL", "address of Ray's job server, such as http://head:8265", _text, _RAY)
    requirements: str | None = _option("FILE", "requirements file that Ray installs for the job", _text, _RAY)
    partition: str | None = _option("NAME", "partition of the job", _text, _SLURM)
    account: str | None = _option("NAME", "account that is charged", _text, _SLURM)
    time: str | None = _option("HH:MM:SS", "time limit, also DAYS-HH:MM:SS", _time, _SLURM, _KUBERAY)
    gpu: str | None = _option("KIND", "kind of GPU, such as H100", _text, _SLURM, _SKYPILOT)
    cpus: int | None = _option("N", "CPU cores per node", _count, _SLURM, _KUBERAY, _SKYPILOT)
    memory: str | None = _option("512G", "memory per node, such as 512G", _memory, _SLURM, _KUBERAY, _SKYPILOT)
    image: str | None = _option(
        "IMAGE",
        "container image; on Slurm one of pyxis, or a .sif file of Apptainer",
        _text,
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
        "starts after the first: after a notice or a lost node (slurm, default 20), or a failure (kuberay, default 3)",
        _count, _SLURM, _KUBERAY,
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
        """The lines as YAML, which targets with a manifest merge into it."""
        return _yaml("\n".join(self.line), f"--line of {self.kind.value}")


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
        kind, where = str(in_file.pop("target", "")), f"{on}: target"
    known = [each.value for each in TargetKind]
    if kind not in known:
        found = f"{where} is missing" if not kind else f"{where}={kind} is not a target"
        raise ConfigError(
            f"{found}.",
            remedy=f"{did_you_mean(kind, known)}Use {', '.join(known)}, or a file that says target: slurm.",
        )
    target = Target(TargetKind(kind))
    target = _with(target, in_file, lambda name: f"{on}: {name}")
    return _with(target, given, lambda name: f"--{name}")


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
            value = [yaml.safe_dump(value, sort_keys=False)]
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
    content = _yaml(text, str(file), yaml.BaseLoader)
    if isinstance(content.get("line"), dict):  # YAML of the target itself, with its own types
        content["line"] = _yaml(text, str(file))["line"]
    return content


def _yaml(
    text: str, where: str, loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader
) -> dict[str, object]:
    try:
        content = yaml.load(text, loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML: {problem}.", remedy="Correct it.") from error
    if content is None or content == "":
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _wrong(where, content, "a mapping, such as 'key: value'")
    return content


def _wrong(where: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{where}={value} is not {wanted}.", remedy=f"Give {wanted}.")
