"""Devices from YAML: the known ones in `assets/devices.yaml`, and a user's own."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.nearest import did_you_mean, did_you_mean_any
from hybridflow.config.paths import user_path
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.mapping.devices import Cluster, Device, Efficiency

_KNOWN = Path(__file__).resolve().parents[1] / "assets" / "devices.yaml"
_FILE = re.compile(r"(?P<path>.*\.ya?ml)(?::(?P<name>.*))?", re.IGNORECASE)
_REFERENCE = "Write it as in hybridflow/assets/devices.yaml."

_ROLLOUTS = tuple(map(str, ROLLOUT_ENGINES))
_TRAINING = tuple(engine.name for engine in TRAINING_ENGINES)
_ENGINES = (*_TRAINING, *_ROLLOUTS)
_NUMBERS = {
    "memory_mib": (1, 1e9),
    "matrix_tflops": (1e-6, 1e6),
    "float32_tflops": (1e-6, 1e6),
    "memory_gb_per_second": (1e-3, 1e6),
    "node_gb_per_second": (1e-6, 1e6),
    "network_gb_per_second": (1e-6, 1e6),
    "host_gb_per_second": (1e-6, 1e6),
    "storage_gb_per_second": (1e-6, 1e6),
    "devices_per_node": (1, 1e6),
    "reserved_mib": (0, 1e9),
    "host_memory_mib": (0, 1e9),
    "matrix_efficiency": (1e-6, 1),
    "bandwidth_efficiency": (1e-6, 1),
    "sync_seconds": (0, 10),
    "cores": (0, 1e6),
}
"""Ranges of the numbers of a device."""

_BY_ENGINE = {
    "launch_seconds": (_ENGINES, (0, 10)),
    "request_seconds": (_ROLLOUTS, (0, 10)),
    "slowdown": (_TRAINING, (0.01, 100)),
}
"""Keys with a number by engine: the engines that they may name, and the range of the numbers."""

_DEFAULTS = {"matrix_efficiency": 0.5, "bandwidth_efficiency": 0.5, "sync_seconds": 60e-6}
_STORAGE = 2.0
"""Assumed: a local NVMe disk reads about 7 GB/s, and a node often gets about 1 GB/s from a shared file system."""

_HOST_SHARE = 2
"""Host memory per device, in multiples of the device's, if a user's file does not have it."""

_WHOLE = ("devices_per_node",)
_UNITS = {
    "mib": "a MiB is 2^20 bytes, and nvidia-smi shows a device's memory in this unit",
    "tflops": "a TFLOPS is 10^12 operations per second, of dense matrices",
    "second": "a GB is 10^9 bytes, and links are counted per device in one direction",
    "node": "it is the number of devices that the faster link connects",
    "efficiency": "it is a fraction of a peak rate",
    "cores": "it is the number of processes that run at these rates at once, and 0 for anything but a CPU",
    "slowdown": "it is the factor by which an engine's layers take longer than the other rates predict",
    "seconds": "it is the latency of a collective, or what an engine takes to launch a layer or to serve a response",
}
"""By the end of a key, what it counts."""

_KEYS = (*_NUMBERS, *_BY_ENGINE, "like", "also")


def find_device(text: str) -> Cluster:
    """One device with the links and the node that it usually has, as a cluster of one.

    `text` is a known name (`H100`, in any case), or a user's file: `my.yaml`, or `my.yaml:NAME` if it has several.
    """
    if (file := _FILE.fullmatch(text)) is None:
        return _known_device(text)
    path, name = user_path(file["path"]), file["name"]
    found = _read(path, str(path))
    if not name:
        if len(found) > 1:
            raise ConfigError(
                f"{path} has {len(found)} devices, and none is chosen.",
                remedy=f"Name one of them, as in {path}:{next(iter(found))}. They are: {', '.join(found)}.",
            )
        name = next(iter(found))
    if name not in found:
        raise ConfigError(
            f"{path} has no device '{name}'.", remedy=f"{did_you_mean(name, found)}It has: {', '.join(found)}."
        )
    return _cluster(name, found[name], f"{path}: {name}")


def write_device(path: Path, cluster: Cluster, *, about: str) -> None:
    """Writes one device as a file that `find_device` reads, with `about` as a comment; four digits of each number."""
    device, efficiency = cluster.device, cluster.device.efficiency
    numbers = {
        "memory_mib": device.memory_bytes / 2**20,
        "host_memory_mib": cluster.host_bytes / 2**20,
        "matrix_tflops": device.matrix_flops / 1e12,
        "float32_tflops": device.float32_flops / 1e12,
        "memory_gb_per_second": device.memory_bandwidth / 1e9,
        "node_gb_per_second": cluster.node_link / 1e9,
        "network_gb_per_second": cluster.network_link / 1e9,
        "host_gb_per_second": cluster.host_link / 1e9,
        "storage_gb_per_second": cluster.storage_link / 1e9,
        "devices_per_node": cluster.devices_per_node,
        "reserved_mib": device.reserved_bytes / 2**20,
        "matrix_efficiency": efficiency.matrix,
        "bandwidth_efficiency": efficiency.bandwidth,
        "sync_seconds": efficiency.sync_seconds,
        "cores": device.cores,
    }
    entry: dict[str, object] = {key: _rounded(number) for key, number in numbers.items()}
    for key in _BY_ENGINE:
        entry[key] = {str(name): _rounded(number) for name, number in getattr(device, key).items()}
    text = "".join(f"# {line}\n" for line in about.splitlines())
    try:
        path.write_text(text + yaml.safe_dump({device.name: entry}, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written: {error.strerror}.", remedy="Give a file in an existing directory."
        ) from error


def device_like(name: str, memory_bytes: int) -> Cluster:
    """The known GPU with the name that the driver reports, otherwise the one with the closest memory; with this memory.

    Raises `ConfigError` if both are unknown: a name that is not known, and a memory of 0.
    """
    try:
        found = _known_device(name.lower().replace("geforce", "").replace("tesla", ""))
    except ConfigError as error:
        if not memory_bytes:
            raise ConfigError(
                "The GPUs of this run are not known to the planner.",
                remedy="Describe them: trainer.device_file=FILE.yaml, or hybridflow plan --on DEVICES.",
            ) from error
        gpus = [known for known in known_devices() if not known.device.is_cpu]
        found = min(gpus, key=lambda known: abs(known.device.memory_bytes - memory_bytes))
    return replace(found, device=replace(found.device, memory_bytes=memory_bytes)) if memory_bytes else found


def known_devices() -> list[Cluster]:
    """The known kinds of devices, as clusters of one."""
    return [_known_device(name) for name in _known()]


def _known_device(name: str) -> Cluster:
    entries = _known()
    names = {_plain(each): key for key, entry in entries.items() for each in (key, *entry.get("also", ()))}
    if _plain(name) not in names:
        raise ConfigError(
            f"'{name}' is not a known device.",
            remedy=f"{did_you_mean_any(name.upper(), list(entries))}Known devices: {', '.join(entries)}. Describe"
            " another in a YAML file of the same form as hybridflow/assets/devices.yaml, and give FILE.yaml:NAME.",
        )
    key = names[_plain(name)]
    return _cluster(key, entries[key], f"{_KNOWN.name}: {key}")


@cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    return _read(_KNOWN, _KNOWN.name)


def _plain(name: str) -> str:
    """A name without case and punctuation: `RTX 4090` is `rtx4090`."""
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))


def _read(path: Path, where: str) -> Mapping[str, Mapping[str, Any]]:
    """The devices in a file by name, unchecked."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The file of devices {where} cannot be read: {error.strerror or error}.", remedy="Give an existing file."
        ) from error
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        summary = " ".join(str(error).split())[:200]
        raise ConfigError(f"The file of devices {where} is not YAML: {summary}.", remedy=_REFERENCE) from error
    is_sound = isinstance(found, dict) and found and all(isinstance(entry, dict) for entry in found.values())
    if not is_sound:
        what = "is empty" if found is None or found == {} else "is not a mapping from names to devices"
        raise ConfigError(f"The file of devices {where} {what}.", remedy=_REFERENCE)
    return {str(name): entry for name, entry in found.items()}


def _cluster(name: str, entry: Mapping[str, Any], where: str) -> Cluster:
    """A device as a cluster of one. `where` is for errors."""
    _check_keys(entry, where)
    like = entry.get("like")
    if like is not None and not isinstance(like, str):
        raise ConfigError(f"{where} has like={like}, which is not the name of a device.", remedy="Use a known device.")
    base = {} if like is None else _known()[_known_device(like).device.name]
    if like is not None and entry.get("cores") and not base.get("cores"):
        raise ConfigError(
            f"{where} has cores={str(entry['cores'])[:40]} and like={like}, which is not a CPU.",
            remedy=f"Leave one of them out; {_UNITS['cores']}.",
        )
    entry = {**_DEFAULTS, "cores": 0, "storage_gb_per_second": _STORAGE, **base, **entry}
    if "host_memory_mib" not in entry and "memory_mib" in entry:
        entry["host_memory_mib"] = _HOST_SHARE * _number("memory_mib", entry["memory_mib"], where)
    if missing := [key for key in _NUMBERS if key not in entry]:
        raise ConfigError(
            f"{where} does not have {', '.join(missing)}.",
            remedy="Add the missing keys, or `like: NAME` to take them from a known device.",
        )
    numbers = {key: _number(key, entry[key], where) for key in _NUMBERS}
    if numbers["reserved_mib"] >= numbers["memory_mib"]:
        raise ConfigError(
            f"{where} has reserved_mib={numbers['reserved_mib']:g}, which is all of memory_mib="
            f"{numbers['memory_mib']:g}.",
            remedy="Give the memory that the driver takes from every process, such as 1024.",
        )
    device = Device(
        name=name,
        memory_bytes=int(numbers["memory_mib"] * 2**20),
        matrix_flops=numbers["matrix_tflops"] * 1e12,
        float32_flops=numbers["float32_tflops"] * 1e12,
        memory_bandwidth=numbers["memory_gb_per_second"] * 1e9,
        reserved_bytes=int(numbers["reserved_mib"] * 2**20),
        efficiency=Efficiency(*(numbers[key] for key in _DEFAULTS)),
        cores=numbers["cores"],
        **{key: _by_engine(key, entry.get(key, {}), where) for key in _BY_ENGINE},
    )
    node, network, host, storage = (
        numbers[f"{level}_gb_per_second"] * 1e9 for level in ("node", "network", "host", "storage")
    )
    return Cluster(
        device=device,
        num_devices=1,
        devices_per_node=int(numbers["devices_per_node"]),
        node_link=node,
        network_link=network,
        host_link=host,
        host_bytes=numbers["host_memory_mib"] * 2**20,
        storage_link=storage,
    )


def _by_engine(key: str, found: object, where: str) -> dict[str, float]:
    """Numbers by engine."""
    engines, limits = _BY_ENGINE[key]
    names = [name for name in found if name not in engines] if isinstance(found, dict) else []
    if not isinstance(found, dict) or names:
        shown = f"the unknown engine '{names[0]}'" if names else str(found)[:40]
        raise ConfigError(
            f"{where} has {shown} in {key}.",
            remedy=f"Give numbers by engine, as in {{{engines[0]}: 0.001}}. Engines: {', '.join(engines)}.",
        )
    return {name: _number(f"{key}.{name}", value, where, limits) for name, value in found.items()}


def _rounded(number: float) -> float | int:
    number = float(f"{number:.4g}") if abs(number) < 1e4 else round(number)
    return int(number) if number == int(number) else number


def _check_keys(keys: Iterable[object], where: str) -> None:
    unknown = [key for key in keys if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"{where} has the unknown key '{unknown[0]}'.",
            remedy=f"{did_you_mean(str(unknown[0]), _KEYS)}Keys of a device: {', '.join(_KEYS)}.",
        )


def _number(key: str, value: object, where: str, limits: tuple[float, float] | None = None) -> float:
    smallest, largest = limits or _NUMBERS[key]
    kind = "a whole number" if key in _WHOLE else "a number"
    try:
        # YAML reads 3e-5, without a point, as text.
        number = math.nan if isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not smallest <= number <= largest or (key in _WHOLE and number % 1):
        raise ConfigError(
            f"{where} has {key}={str(value)[:40]}, which is not {kind} from {smallest:g} to {largest:g}.",
            remedy=f"Correct it; {_UNITS[key.partition('.')[0].rpartition('_')[2]]}.",
        )
    return number
