"""Memory of the host that is locked for a GPU."""

import mmap

import pytest

from hybridflow.engines.training.host_memory import locked_pages
from hybridflow.errors import EngineError


def test_locked_memory_is_whole_pages_of_its_own():
    locked: list[tuple[int, int]] = []

    def lock(start: int, size: int) -> int:
        locked.append((start, size))
        return 0

    memories = [locked_pages(size, lock) for size in (1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 0)]
    assert [size // mmap.PAGESIZE for _, size in locked] == [1, 1, 2]
    assert all(start % mmap.PAGESIZE == 0 for start, _ in locked)
    assert [memory.numel() for memory in memories] == [size for _, size in locked] + [0]


def test_memory_that_cannot_be_locked_is_an_error_that_says_what_to_do():
    with pytest.raises(EngineError, match="cannot be page-locked .CUDA error 2..*offload_optimizer"):
        locked_pages(100, lambda start, size: 2)
