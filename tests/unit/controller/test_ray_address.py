"""A cluster that cannot be joined is reported with what a cluster with tokens needs."""

import pytest
import ray

from hybridflow.controller.backends.ray.cluster import _initialized
from hybridflow.errors import ResourceError


@pytest.mark.parametrize(("mode", "is_reported"), [(None, True), ("token", False)])
def test_a_cluster_that_refuses_is_told_with_the_settings_of_its_tokens(monkeypatch, mode, is_reported):
    def refused(**settings: object) -> None:
        raise ConnectionError("authentication failed")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ResourceError, match="RAY_ADDRESS=10.0.0.1:6379: authentication failed") as caught:
        _initialized("10.0.0.1:6379")
    assert ("RAY_AUTH_MODE=token" in caught.value.remedy and "~/.ray/auth_token" in caught.value.remedy) == is_reported
