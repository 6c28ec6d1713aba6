"""A cluster in one word: `8xH100`, or `16x8xA100-80`."""

import re
from dataclasses import replace

from hybridflow.errors import ConfigError
from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.devices import Cluster

MOST_DEVICES = 1 << 17
_WORD = re.compile(r"(?:(?P<nodes>\d+)\s*x\s*)?(?:(?P<devices>\d+)\s*x\s*)?(?P<kind>[^\s].*)", re.IGNORECASE)
_FORMS = "Write COUNTxDEVICE (8xH100), NODESxCOUNTxDEVICE (16x8xA100-80), or a device alone (cpu)."


def cluster_of(text: str) -> Cluster:
    """The cluster that a word describes.

    `8xH100` is one node, `16x8xA100-80` 16 nodes of 8, `128xH100` nodes of the device's usual size. The device is a
    known one, or `my.yaml:NAME`.
    """
    word = _WORD.fullmatch(text.strip())
    if word is None:
        raise ConfigError(f"'{text}' does not describe a cluster.", remedy=_FORMS)
    counts = [int(word[name][:12]) for name in ("nodes", "devices") if word[name] is not None]
    if any(not 1 <= count <= MOST_DEVICES for count in counts):
        raise ConfigError(
            f"'{text}' has a count of {min(counts) if 0 in counts else max(counts)}, which is not from 1 to"
            f" {MOST_DEVICES}.",
            remedy=_FORMS,
        )
    if re.match(r"-?[\d.]+\s*x", word["kind"], re.IGNORECASE):
        raise ConfigError(f"'{text}' does not describe a cluster: '{word['kind']}' is not a device.", remedy=_FORMS)
    kind = find_device(word["kind"])
    if len(counts) == 2:
        nodes, per_node = counts
        return replace(kind, num_devices=nodes * per_node, devices_per_node=per_node)
    count, usual = counts[0] if counts else 1, kind.devices_per_node
    if count > usual and count % usual:
        raise ConfigError(
            f"'{text}' does not fill nodes of {usual} devices, the usual size for {kind.device.name}.",
            remedy=f"Use {count // usual * usual} or {(count // usual + 1) * usual} devices, or give the nodes, as in"
            f" {_other_form(count, usual)}x{word['kind']}.",
        )
    return replace(kind, num_devices=count, devices_per_node=min(count, usual))


def clusters_of(text: str) -> tuple[Cluster, dict[str, Cluster]]:
    """The cluster of a word, and those of pools that have other devices: `4x8xH100,values=2xA100-80`."""
    first, *others = text.split(",")
    pools = {}
    for other in others:
        name, equals, word = other.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"'{other}' does not name the devices of a pool.",
                remedy="Write POOL=DEVICES after the run's devices, as in 4xH100,values=2xA100-80.",
            )
        if name.strip() in pools:
            raise ConfigError(
                f"'{text}' gives the devices of pool '{name.strip()}' twice.", remedy="Leave one of them out."
            )
        pools[name.strip()] = cluster_of(word)
    return cluster_of(first), pools


def _other_form(count: int, usual: int) -> str:
    """Nodes of equal size with this number of devices in total."""
    per_node = max(size for size in range(1, usual + 1) if count % size == 0)
    return f"{count // per_node}x{per_node}"
