"""The name and the addresses of this machine, its ports, and proxies."""

import os
import socket
import time
from collections.abc import Iterator

import psutil

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem, warning

_LOOPBACK = "127.0.0.1"
_SLOW_SECONDS = 2.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_MOST_PORTS = 32
"""Ports that a check takes at once: about as many as Ray and the stores of a run on one machine."""


def _loopback(place: Place) -> Iterator[Finding]:
    place.doing(f"connecting to {_LOOPBACK}")
    held: list[socket.socket] = []
    try:
        for _ in range(_MOST_PORTS):
            held.append(socket.create_server((_LOOPBACK, 0)))
        with socket.create_connection(held[0].getsockname(), timeout=5.0) as client:
            server, _ = held[0].accept()
            with server:
                client.sendall(b"hybridflow")
                received = server.recv(16)
    except OSError as error:
        yield problem(
            "loopback",
            f"processes cannot connect to one another at {_LOOPBACK}: {error.strerror or error}",
            "Bring up the loopback interface (ip link set lo up), and let the firewall accept connections from it.",
        )
        return
    finally:
        for each in held:
            each.close()
    assert received == b"hybridflow", f"received {received!r}"
    yield ok("loopback", f"{_MOST_PORTS} ports at {_LOOPBACK} could be opened, and one connected to")


def _hostname(place: Place) -> Iterator[Finding]:
    name, remedy = socket.gethostname(), "Add a line to /etc/hosts: {} {}"
    own = {a.address: interface for interface, known in psutil.net_if_addrs().items() for a in known}
    outer = next((a for a in own if a.count(".") == 3 and not a.startswith("127.")), _LOOPBACK)
    place.doing(f"resolving {name}")
    began = time.monotonic()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        yield warning(
            "hostname",
            f"the name of this machine, {name}, does not resolve: {error.strerror or error}",
            remedy.format(outer, name),
        )
        return
    seconds = time.monotonic() - began
    foreign = [address for address in addresses if address not in own and not address.startswith("127.")]
    if foreign:
        yield warning(
            "hostname",
            f"{name} resolves to {', '.join(foreign)}, which is not an address of this machine ({', '.join(own)})",
            remedy.format(outer, name),
        )
    elif seconds > _SLOW_SECONDS:
        yield warning("hostname", f"resolving {name} took {seconds:.1f} s", remedy.format(outer, name))
    else:
        yield ok("hostname", f"{name} is {', '.join(addresses)}")


def _proxies(place: Place) -> Iterator[Finding]:
    found = [name for name in (*_PROXIES, *map(str.upper, _PROXIES)) if os.environ.get(name)]
    exempt = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}".split(",")
    if found and "*" not in exempt and not {"localhost", _LOOPBACK} <= set(map(str.strip, exempt)):
        yield warning(
            "proxies",
            f"{', '.join(found)} also applies to connections within this machine",
            f"export no_proxy=localhost,{_LOOPBACK} (and the addresses of the other nodes)",
        )


CHECKS = (
    Check("loopback", "opening ports", _loopback),
    Check("hostname", "resolving the name of this machine", _hostname),
    Check("proxies", "looking at proxies", _proxies),
)
