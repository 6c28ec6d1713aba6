"""Objects gathered and dealt out over the ranks of a mesh, and steps that fail on all ranks when they fail on one."""

from types import TracebackType
from typing import TypeVar, cast

import torch.distributed as dist

from hybridflow.errors import EngineError, HybridflowError
from hybridflow.parallel.groups import Ranks

ItemT = TypeVar("ItemT")


def gathered(item: ItemT, ranks: Ranks) -> list[ItemT]:
    """On rank 0 what every rank gave, by rank; nothing on the others."""
    if ranks.mesh.size == 1:
        return [item]
    items: list[ItemT | None] = [None for _ in range(ranks.mesh.size)]
    dist.gather_object(item, items if ranks.rank == 0 else None)
    return cast(list[ItemT], items) if ranks.rank == 0 else []


def dealt(items: list[ItemT], ranks: Ranks) -> ItemT:
    """The item of this rank, of those that rank 0 gave, one for each."""
    if ranks.mesh.size == 1:
        return items[0]
    mine: list[ItemT | None] = [None]
    dist.scatter_object_list(mine, items if ranks.rank == 0 else None)
    return cast(ItemT, mine[0])


class Together:
    """A step that all ranks take: where it fails on one it fails on all, with that rank's error; nobody waits in vain.

        with Together(ranks):
            write_own_part()
        # here every rank has written its part

    Ranks do not talk to one another inside the block.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        """Begins the step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the others, and raises the first rank's error where this rank has none of its own."""
        if self._ranks.mesh.size == 1 or not (error is None or isinstance(error, Exception)):
            return
        told: list[HybridflowError | None] = [None] * self._ranks.mesh.size
        dist.all_gather_object(told, None if error is None else self._told(error))
        first = next((failure for failure in told if failure is not None), None)
        if error is None and first is not None:
            raise first

    def _told(self, error: Exception) -> HybridflowError:
        if isinstance(error, HybridflowError):
            return error
        return EngineError(
            f"Rank {self._ranks.rank} failed: {type(error).__name__}: {error}.", remedy="See the log of that rank."
        )
