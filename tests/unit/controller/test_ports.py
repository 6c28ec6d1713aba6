"""What is said of an address where no Ray answers."""

import pytest

from hybridflow.controller.backends.ray.cluster import check_cluster
from hybridflow.errors import ResourceError


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_a_run_on_one_node_is_told_to_do_without_a_cluster(monkeypatch, nodes):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match="no process is listening there") as caught:
        check_cluster(nodes)
    assert ("unset RAY_ADDRESS" in caught.value.remedy) is (nodes == 1)
    assert ("trainer.nodes=2 needs a cluster" in caught.value.remedy) is (nodes == 2)
