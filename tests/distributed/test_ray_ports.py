"""A Ray that a run starts for itself can be reached from this machine alone."""

import ipaddress

import psutil
import pytest

from hybridflow.controller import ResourcePool, WorkerGroup
from tests.unit.controller.workers import Talker

pytestmark = pytest.mark.ray


def test_every_port_of_a_live_run_is_on_the_loopback_interface(ray_backend):
    group = WorkerGroup(Talker, ResourcePool("scanned", 2), ray_backend, role="talker")
    group.total(1.0).result()  # the ranks have met
    this = psutil.Process()
    listening = {
        f"{process.name()} {connection.laddr.ip}": ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
        for process in (this, *this.children(recursive=True))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    group.kill()
    names = " ".join(listening)
    assert "raylet" in names and "gcs_server" in names and "RayHost" in names
    assert [name for name, address in listening.items() if not address.is_loopback] == []
