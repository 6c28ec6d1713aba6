"""Ports that environment variables of Ray set: checked before Ray starts, which waits minutes for a wrong one."""

import os
import socket

from hybridflow.errors import ResourceError

ADDRESS = "RAY_ADDRESS"
STORE_PORT = "RAY_GCS_SERVER_PORT"
"""The port of the cluster's own store, where Ray starts here and the user fixed one."""

_TIMEOUT_SECONDS = 5.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""HTTP/2's connection preface with empty settings; gRPC, which Ray speaks, answers with its own (RFC 9113, 3.4)."""

_SETTINGS_FRAME = 4


def check_ports(nodes: int) -> None:
    """Raises `ResourceError` if no Ray answers at RAY_ADDRESS, or if the port for a new Ray is in use.

    Only a run on one node (`trainer.nodes`) can do without a cluster.
    """
    host, colon, port = os.environ.get(ADDRESS, "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        _check_answers(host, int(port), nodes)
    wanted = os.environ.get(STORE_PORT, "")
    if not os.environ.get(ADDRESS) and wanted.isdigit() and int(wanted):
        _check_free(int(wanted))


def _check_answers(host: str, port: int, nodes: int) -> None:
    alone = f", or unset {ADDRESS}: then a Ray of this run's own is started" if nodes == 1 else ""
    needed = "" if nodes == 1 else f" A run on trainer.nodes={nodes} needs a cluster that is already running."
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS) as connection:
            connection.sendall(_GREETING)
            header = connection.recv(9)
    except TimeoutError:
        header = b""
    except OSError as error:
        raise ResourceError(
            f"{ADDRESS}={host}:{port}, and no process is listening there: {error.strerror or error}.",
            remedy=f"Start a cluster there (ray start --head --port={port}), correct {ADDRESS}{alone}.{needed}",
        ) from error
    if len(header) < 9 or header[3] != _SETTINGS_FRAME:
        raise ResourceError(
            f"{ADDRESS}={host}:{port}, and the port is in use by something that is not Ray.",
            remedy=f"Give the address that 'ray start --head' printed{alone}.{needed}",
        )


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ResourceError(
                f"{STORE_PORT}={port}, and that port is in use: {error.strerror or error}.",
                remedy=f"Unset {STORE_PORT}, so that Ray takes a free port, or end the process that holds it "
                f"(ss -ltnp 'sport = :{port}').",
            ) from error
