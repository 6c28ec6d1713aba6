"""Collectives for bytes and JSON values, and steps that fail on all ranks if they fail on one.

torch's object collectives unpickle what they receive, which can execute code. Bytes and JSON cannot. A message has at
most `MOST_BYTES`.
"""

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import EngineError, HybridflowError, error_from, error_text
from hybridflow.parallel.groups import Ranks

MOST_BYTES = 1 << 30

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
"""Values that JSON can represent. Tuples are received as lists."""


def gather_json(item: Plain, ranks: Ranks) -> list:
    """Gathers the items of all ranks on rank 0, in the order of ranks; other ranks receive an empty list."""
    own = json.dumps(item)
    if ranks.mesh.size == 1:
        return [json.loads(own)]
    sent, sizes = _padded(own.encode(), None)
    parts = [torch.empty_like(sent) for _ in sizes] if ranks.rank == 0 else None
    dist.gather(sent, parts)
    return [json.loads(_cut(part, size)) for part, size in zip(parts or (), sizes if parts else (), strict=True)]


def scatter_json(items: Sequence[Plain], ranks: Ranks) -> list:
    """Scatters the items of rank 0, one list per rank; returns this rank's."""
    texts = [json.dumps(item).encode() for item in items]
    if ranks.mesh.size == 1:
        return json.loads(texts[0])
    sizes = torch.tensor([len(text) for text in texts] if ranks.rank == 0 else [0] * ranks.mesh.size)
    dist.broadcast(sizes, 0)
    longest = checked_size(int(sizes.max()))
    mine = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(mine, [_filled(text, longest) for text in texts] if ranks.rank == 0 else None)
    return json.loads(_cut(mine, int(sizes[ranks.rank])))


def all_gather_bytes(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gathers the messages of all ranks of a group on every rank, in the order of ranks; None is the default group."""
    sent, sizes = _padded(message, group)
    if not sent.numel():
        return [b""] * len(sizes)
    parts = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(parts, sent, group=group)
    return [_cut(part, size) for part, size in zip(parts, sizes, strict=True)]


def broadcast_bytes(message: bytes, group: dist.ProcessGroup, *, source: int) -> bytes:
    """Sends the message of one rank to all ranks of the group; `source` is that rank's number in the group."""
    announced = torch.tensor([len(message)])
    dist.broadcast(announced, group=group, group_src=source)
    size = checked_size(int(announced))
    own = _filled(message, size) if group.rank() == source else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(own, group=group, group_src=source)
    return _cut(own, len(own))


def checked_size(size: int) -> int:
    """The size of a message, as a rank announced it; raises `EngineError` if it exceeds `MOST_BYTES`."""
    if 0 <= size <= MOST_BYTES:
        return size
    raise EngineError(
        f"A rank announced a message of {size} bytes; at most {MOST_BYTES} are accepted.",
        remedy="Check whether other programs can reach the ranks' ports, and restrict access to the network between"
        " the nodes.",
    )


class Together:
    """A step of all ranks: if it fails on one, it fails on all with that rank's error, so no rank waits forever.

        with Together(ranks):
            write_own_part()
        # here every rank has written its part

    The block must not communicate with other ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        """Begins the step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the other ranks; raises the error of the first rank that failed, unless this rank raised one."""
        if self._ranks.mesh.size == 1 or not (error is None or isinstance(error, Exception)):
            return
        failures = all_gather_bytes(b"" if error is None else error_text(self._ours(error)).encode(), None)
        first = next((failure for failure in failures if failure), None)
        if error is None and first is not None:
            raise error_from(first.decode())

    def _ours(self, error: Exception) -> HybridflowError:
        if isinstance(error, HybridflowError):
            return error
        return EngineError(
            f"Rank {self._ranks.rank} failed: {type(error).__name__}: {error}.", remedy="See the log of that rank."
        )


def _padded(message: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """A message padded to the longest one in the group, and the length of every rank's message."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    lengths = [int(size) for size in sizes]
    return _filled(message, checked_size(max(lengths))), lengths


def _filled(message: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8) if size else torch.empty(0)


def _cut(part: Tensor, size: int) -> bytes:
    return part[:size].numpy().tobytes()
