"""Devices from YAML: the known ones, a user's own, and the errors of wrong files."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridflow.errors import ConfigError
from hybridflow.mapping.device_files import device_like, find_device, write_device

KNOWN = [
    *("A100-40", "A100-80", "A800", "H100", "H800", "H200", "H20", "B200", "GB200"),
    *("L40S", "RTX-4090", "A6000", "T4", "CPU"),
]
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
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H800", "H800"),
    ],
)
def test_other_spellings(written, name):
    assert find_device(written).device.name == name


@pytest.mark.parametrize(("name", "full"), [("A800", "A100-80"), ("H800", "H100")])
def test_devices_with_less_nvlink_are_otherwise_those_with_all_of_it(name, full):
    found, other = find_device(name), find_device(full)
    assert found.node_link == 200e9
    assert replace(found, device=replace(found.device, name=full), node_link=other.node_link) == other


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA GeForce RTX 3070", 8, "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", 11, "T4"),
        ("NVIDIA GeForce RTX 3090", 24, "RTX-4090"),
        ("", 80, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 79, "H100"),
    ],
)
def test_a_gpu_that_a_driver_reports_is_described_by_a_known_gpu(reported, gib, name):
    found = device_like(reported, gib << 30).device
    assert (found.name, found.memory_bytes) == (name, gib << 30)


def test_a_known_gpu_whose_memory_is_not_reported_has_its_usual_one():
    assert device_like("NVIDIA H100 80GB HBM3", 0) == find_device("H100")


def test_a_gpu_without_a_known_name_and_memory_is_refused():
    with pytest.raises(ConfigError, match="The GPUs of this run are not known to the planner") as caught:
        device_like("", 0)
    assert "trainer.device_file=FILE.yaml, or hybridflow plan --on DEVICES." in caught.value.remedy


def test_a_device_of_a_user(own_file):
    path = own_file({"mine": OWN | {"sync_seconds": "3e-5"}})
    found = find_device(path)
    assert (found.device.name, found.device.memory_bytes) == ("mine", 1000 * 2**20)
    assert (found.node_link, found.network_link, found.host_link, found.devices_per_node) == (30e9, 3e9, 20e9, 4)
    assert found.device.efficiency.sync_seconds == 3e-5
    assert find_device(f"{path}:mine") == found
    assert found.host_bytes == 2 * found.device.memory_bytes


def test_host_memory_is_that_of_the_node_per_device(own_file):
    assert find_device("H100").host_bytes * 8 == 2 << 40
    assert find_device("cpu").offload_bytes == 0
    assert find_device(own_file({"mine": OWN | {"host_memory_mib": 500}})).host_bytes == 500 << 20


def test_a_known_device_with_another_network(own_file):
    found = find_device(own_file({"mine": {"like": "a100-80", "network_gb_per_second": 3.125}}))
    known = find_device("A100-80")
    assert found.network_link == 3.125e9
    assert (found.node_link, found.device.memory_bytes) == (known.node_link, known.device.memory_bytes)


WRONG_FILES = [
    ("a: [", "is not YAML: while parsing", "as in hybridflow/assets/devices.yaml"),
    ("", "is empty", "as in hybridflow/assets/devices.yaml"),
    ("[]", "is not a mapping from names to devices", "as in hybridflow/assets/devices.yaml"),
    ({"mine": {"like": "H100", "cores": 3}}, "mine has cores=3 and like=H100, which is not a CPU", "Leave one of them"),
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
    assert "Did you mean 'A100-40', 'A100-80' or 'H100'?" in caught.value.remedy
    assert "FILE.yaml:NAME" in caught.value.remedy


def test_a_written_device_is_read_again(tmp_path):
    known = find_device("CPU")
    host = {"launch_seconds": {"single": 4.321e-4, "vllm": 2e-3}, "request_seconds": {"vllm": 1.5e-4}}
    host["slowdown"] = {"fsdp": 1.3}
    written = replace(known, device=replace(known.device, cores=1.75, **host))
    write_device(tmp_path / "devices.yaml", written, about="Measured\nhere")
    assert (tmp_path / "devices.yaml").read_text().startswith("# Measured\n# here\nCPU:\n")
    read = find_device(str(tmp_path / "devices.yaml"))
    assert read == written
    assert {key: vars(read.device)[key] for key in host} == host
    assert read.device.is_cpu
    assert not find_device("H100").device.is_cpu


def test_a_device_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="could not be written") as caught:
        write_device(tmp_path / "none" / "devices.yaml", find_device("CPU"), about="")
    assert "existing directory" in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "seconds", "message", "remedy"),
    [
        ("launch_seconds", {"fdsp": 0.1}, "has the unknown engine 'fdsp' in launch_seconds", "Engines: "),
        ("launch_seconds", 0.1, "has 0.1 in launch_seconds", "Give numbers by engine"),
        ("launch_seconds", {"fsdp": -1}, "has launch_seconds.fsdp=-1, which is not a number from 0 to 10", "a layer"),
        ("slowdown", {"fsdp": 0}, "has slowdown.fsdp=0, which is not a number from 0.01 to 100", "it is the factor"),
        ("request_seconds", {"fsdp": 0.1}, "has the unknown engine 'fsdp' in request_seconds", "{transformers: 0.001}"),
    ],
)
def test_wrong_seconds_of_the_host_are_named(own_file, key, seconds, message, remedy):
    path = own_file({"mine": OWN | {key: seconds}})
    with pytest.raises(ConfigError, match=message) as caught:
        find_device(path)
    assert remedy in caught.value.remedy
