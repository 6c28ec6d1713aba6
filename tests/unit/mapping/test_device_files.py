"""Devices from YAML: the known ones, a user's own, and the errors of wrong files."""

from pathlib import Path

import pytest
import yaml

from hybridflow.errors import ConfigError
from hybridflow.mapping.device_files import find_device

KNOWN = ["A100-40", "A100-80", "H100", "H200", "H20", "B200", "GB200", "L40S", "RTX-4090", "A6000", "T4", "CPU"]
OWN = {
    "memory_mib": 1000,
    "matrix_tflops": 4,
    "float32_tflops": 2,
    "memory_gb_per_second": 300,
    "node_gb_per_second": 30,
    "network_gb_per_second": 3,
    "host_gb_per_second": 20,
    "devices_per_node": 4,
    "reserved_mib": 100,
}


@pytest.fixture
def own_file(tmp_path: Path):
    """A function: devices by name, or a text -> the path of a file with them."""

    def write(content: object) -> str:
        path = tmp_path / "my.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return str(path)

    return write


@pytest.mark.parametrize("name", KNOWN)
def test_known_devices(name):
    found = find_device(name)
    assert found.device.name == name
    assert found.num_devices == 1
    assert 0 < found.device.reserved_bytes < found.device.memory_bytes / 8
    assert found.network_link <= found.node_link
    # The arithmetic intensity from which products are limited by compute: tens to hundreds of operations per byte.
    assert 4 < found.device.matrix_flops / found.device.memory_bandwidth < 500
    assert find_device(name.lower()) == found


@pytest.mark.parametrize(
    ("name", "sold_gb", "flops", "bandwidth"),
    [("A100-80", 80, 312e12, 2.039e12), ("H100", 80, 989.4e12, 3.35e12), ("H20", 96, 148e12, 4e12)],
)
def test_rates_are_per_second_and_memory_in_bytes(name, sold_gb, flops, bandwidth):
    device = find_device(name).device
    assert device.memory_bytes == pytest.approx(sold_gb * 2**30, rel=0.01)
    assert (device.matrix_flops, device.memory_bandwidth) == (flops, bandwidth)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("rtx 4090", "RTX-4090"),
        ("A100-SXM4-80GB", "A100-80"),
        ("RTX A6000", "A6000"),
    ],
)
def test_other_spellings(written, name):
    assert find_device(written).device.name == name


def test_a_device_of_a_user(own_file):
    path = own_file({"mine": OWN | {"sync_seconds": "3e-5"}})
    found = find_device(path)
    assert (found.device.name, found.device.memory_bytes) == ("mine", 1000 * 2**20)
    assert (found.node_link, found.network_link, found.host_link, found.devices_per_node) == (30e9, 3e9, 20e9, 4)
    assert found.device.efficiency.sync_seconds == 3e-5
    assert find_device(f"{path}:mine") == found


def test_a_known_device_with_another_network(own_file):
    found = find_device(own_file({"mine": {"like": "a100-80", "network_gb_per_second": 3.125}}))
    known = find_device("A100-80")
    assert found.network_link == 3.125e9
    assert (found.node_link, found.device.memory_bytes) == (known.node_link, known.device.memory_bytes)


WRONG_FILES = [
    ("a: [", "is not YAML: while parsing", "as in hybridflow/assets/devices.yaml"),
    ("", "is empty", "as in hybridflow/assets/devices.yaml"),
    ("3", "is not a mapping from names to devices", "as in hybridflow/assets/devices.yaml"),
    ({"mine": 3}, "is not a mapping from names to devices", "as in hybridflow/assets/devices.yaml"),
    (OWN, "is not a mapping from names to devices", "as in hybridflow/assets/devices.yaml"),
    ({"mine": OWN, "other": OWN}, "has 2 devices, and none is chosen", "my.yaml:mine. They are: mine, other"),
    ({"mine": OWN | {"memory_gib": 3}}, "my.yaml: mine has the unknown key 'memory_gib'", "Did you mean 'memory_mib'"),
    ({"mine": {"memory_mib": 3}}, "mine does not have matrix_tflops, float32_tflops", "`like: NAME`"),
    ({"mine": {"like": "A100-800"}}, "'A100-800' is not a known device", "Did you mean 'A100-80'"),
    ({"mine": {"like": 4}}, "like=4, which is not the name", "Use a known device"),
    ({"mine": OWN | {"memory_mib": "80 GB"}}, "memory_mib=80 GB, which is not a number from 1 to", "2^20 bytes"),
    ({"mine": OWN | {"matrix_tflops": 312e12}}, r"matrix_tflops=312000000000000.0, .* to 1e\+06", "10^12 operations"),
    ({"mine": OWN | {"node_gb_per_second": 0}}, "node_gb_per_second=0, which is not a number from", "in one direction"),
    ({"mine": OWN | {"devices_per_node": 1.5}}, "devices_per_node=1.5, which is not a whole number", "faster link"),
    ({"mine": OWN | {"matrix_efficiency": 50}}, "matrix_efficiency=50, which is not a number from", "fraction"),
    ({"mine": OWN | {"memory_mib": True}}, "memory_mib=True, which is not a number", "nvidia-smi"),
    ({"mine": OWN | {"sync_seconds": float("nan")}}, "sync_seconds=nan, which is not a number", "latency"),
    ({"mine": OWN | {"reserved_mib": 1000}}, "reserved_mib=1000, which is all of memory_mib=1000", "such as 1024"),
]


@pytest.mark.parametrize(("content", "found", "remedy"), WRONG_FILES, ids=[each[1][:30] for each in WRONG_FILES])
def test_wrong_files(own_file, content, found, remedy):
    with pytest.raises(ConfigError, match=found) as caught:
        find_device(own_file(content))
    assert remedy in caught.value.remedy


def test_a_name_that_the_file_does_not_have(own_file):
    with pytest.raises(ConfigError, match="has no device 'mime'") as caught:
        find_device(f"{own_file({'mine': OWN})}:mime")
    assert "Did you mean 'mine'? It has: mine." in caught.value.remedy


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file") as caught:
        find_device(str(tmp_path / "none.yaml"))
    assert "Give an existing file" in caught.value.remedy


def test_near_names_of_unknown_devices_are_suggested():
    with pytest.raises(ConfigError, match="'A100' is not a known device") as caught:
        find_device("A100")
    assert "'A100-80' or 'A100-40'?" in caught.value.remedy
    assert "FILE.yaml:NAME" in caught.value.remedy
