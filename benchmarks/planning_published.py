"""The files of published numbers, and the devices and models that they name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.devices import Cluster, Efficiency
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.catalogue import find_model
from hybridflow.models.geometry import ModelGeometry

_FILES = Path(__file__).parent / "published"


@cache
def read(name: str) -> Mapping[str, Any]:
    """A file of published numbers."""
    return yaml.safe_load((_FILES / name).read_text(encoding="utf-8"))


def paper_figures() -> Mapping[str, Any]:
    """The numbers of HybridFlow."""
    return read("paper_figures.yaml")


def paper_workload() -> Workload:
    """The rows of HybridFlow's experiments."""
    return Workload(1024, Lengths.constant(1024), Lengths.constant(1024), optimizer_steps=8)


def cluster_of(device: str, devices: int, efficiency: Efficiency | None, link: float | None = None) -> Cluster:
    """A cluster of known devices, with other constants or another network if given."""
    found = _device(device)
    own = found.device if efficiency is None else replace(found.device, efficiency=efficiency)
    return replace(found, device=own, num_devices=devices, network_link=link or found.network_link)


@cache
def geometry_of(name: str) -> ModelGeometry:
    """The sizes of a model."""
    return find_model(name).geometry


@cache
def _device(name: str) -> Cluster:
    return find_device(name)
