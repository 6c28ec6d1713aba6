"""Clusters in one word."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.mapping.clusters import cluster_of


@pytest.mark.parametrize(
    ("word", "name", "devices", "per_node"),
    [
        ("8xH100", "H100", 8, 8),
        ("16x8xA100-80", "A100-80", 128, 8),
        ("128xH100", "H100", 128, 8),
        ("2 x 3 X h100", "H100", 6, 3),
        ("4xH100", "H100", 4, 4),
        ("cpu", "CPU", 1, 1),
        ("4xcpu", "CPU", 4, 4),
        ("64xGB200", "GB200", 64, 64),
        ("8x4090", "RTX-4090", 8, 8),
        ("2xrtx 4090", "RTX-4090", 2, 2),
    ],
)
def test_words(word, name, devices, per_node):
    cluster = cluster_of(word)
    assert (cluster.device.name, cluster.num_devices, cluster.devices_per_node) == (name, devices, per_node)


def test_a_device_of_a_user(tmp_path):
    path = tmp_path / "8x.yaml"
    path.write_text("slow: {like: H100, network_gb_per_second: 12.5}\nfast: {like: H100, matrix_tflops: 2000}\n")
    cluster = cluster_of(f"2x8x{path}:slow")
    assert (cluster.device.name, cluster.num_devices, cluster.network_link) == ("slow", 16, 12.5e9)


def test_links_depend_on_how_many_devices_take_part():
    cluster = cluster_of("2x8xH100")
    assert (cluster.node_link, cluster.network_link) == (450e9, 50e9)


@pytest.mark.parametrize(
    ("word", "found", "remedy"),
    [
        ("", "'' does not describe a cluster", "8xH100"),
        ("8", "'8' is not a known device", "FILE.yaml:NAME"),
        ("8x", "'8x' is not a device", "COUNTxDEVICE"),
        ("0xH100", "a count of 0, which is not from 1", "COUNTxDEVICE"),
        ("9999999999999xH100", "a count of 999999999999, which is not", "COUNTxDEVICE"),
        ("-1xH100", "'-1xH100' is not a device", "COUNTxDEVICE"),
        ("1.5xH100", "'1.5xH100' is not a device", "COUNTxDEVICE"),
        ("2x2x2xH100", "'2xH100' is not a device", "NODESxCOUNTxDEVICE"),
        ("8xH1000", "'H1000' is not a known device", "Did you mean 'H100'"),
        ("12xH100", "does not fill nodes of 8 devices", "Use 8 or 16 devices, or give the nodes, as in 2x6xH100"),
        ("13xh100", "the usual size for H100", "13x1xh100"),
    ],
)
def test_nonsense(word, found, remedy):
    with pytest.raises(ConfigError, match=found) as caught:
        cluster_of(word)
    assert remedy in caught.value.remedy
