"""A store whose values are signed, so that values written by others are rejected.

torch's TCPStore has no authentication. Anyone who can reach its port can list its keys and overwrite them, such as the
addresses at which gloo's ranks connect. Here every value carries an HMAC-SHA256 of its key and itself under a secret
that only the ranks of a pool have; they receive it from the driver.
"""

# pyright: reportPrivateImportUsage=false

import hashlib
import hmac
import secrets
import socket
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from hybridflow.errors import ResourceError

SIGNATURE_BYTES = 32


class StoreAddress(NamedTuple):
    """Where a store is served, and the secret for writing to it. `str` and `repr` omit the secret."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    __repr__ = __str__


_kept: list[dist.Store] = []


class SignedStore(dist.Store):
    """A store that signs values when they are set and verifies them when they are read.

    Reading a value without a valid signature raises a `ResourceError`. Counters (`add`) are not signed: an attacker who
    changes one can end the run early or make it wait, but cannot make a rank read other data.

    torch calls a store written in Python by these method names, including `deleteKey` and `getNumKeys`. It does not
    keep the Python object alive, so stores are kept until the process ends.
    """

    def __init__(self, store: dist.Store, address: StoreAddress) -> None:
        super().__init__()
        self._store = store
        self.address = address
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Signs a value and puts it under a key."""
        self._store.set(key, self._signed(key, value))  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        return self._checked(key, self._store.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replaces `expected_value` ("" for a missing key) by `desired_value`; returns the value stored afterwards."""
        before = self._signed(key, expected_value) if expected_value else b""
        after = self._store.compare_set(key, before, self._signed(key, desired_value))  # pyright: ignore[reportArgumentType]
        return self._checked(key, after) if after else b""

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, and returns its new value."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys exist."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it existed."""
        return self._store.delete_key(key)

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        """The number of keys."""
        return self._store.num_keys()

    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> "SignedStore":
        """The same store."""
        return self

    def _signed(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return self._signature(key, data) + data

    def _checked(self, key: str, found: bytes) -> bytes:
        signature, data = found[:SIGNATURE_BYTES], found[SIGNATURE_BYTES:]
        if hmac.compare_digest(signature, self._signature(key, data)):
            return data
        raise ResourceError(
            f"The store at {self.address}, which connects the ranks of this run, holds {len(found)} bytes under '{key}'"
            " that none of them wrote.",
            remedy="Another program writes to the run's port: restrict access to the network between the nodes,"
            " then resume from the last checkpoint.",
        )

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self.address.secret, f"{len(key)}:{key}:".encode() + data, hashlib.sha256)


def served_store(host: str, *, port: int = 0) -> SignedStore:
    """A store served by this process, only at this address; port 0 chooses a free port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
            )
            listener.detach()  # the store owns it now
    except (RuntimeError, OSError) as error:
        raise ResourceError(
            f"The ranks cannot connect through {host}:{port}: {str(error).splitlines()[0]}.",
            remedy="End the process that holds the port, or use port 0 for any free one.",
        ) from error
    return SignedStore(store, StoreAddress(host, port, secrets.token_bytes(32)))


def connected_store(address: StoreAddress, timeout_seconds: float) -> SignedStore:
    """The store that another process serves at an address."""
    host, port, timeout = address.host, address.port, timedelta(seconds=timeout_seconds)
    try:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise ResourceError(
            f"Rank 0 does not answer at {address}: {str(error).splitlines()[0]}.",
            remedy="Check that the first rank's process is alive and that the nodes can reach one another.",
        ) from error
    return SignedStore(store, address)
