import ctypes
import mmap

import psutil
import pytest
import torch
from torch import Tensor, nn

from hybridflow.engines.rollout.memory import WeightBuffer, free_pages

PAGE = mmap.PAGESIZE
FLOATS = PAGE // 4
MB = 1 << 20


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.rand(shape, generator=generator).to(dtype) + 1, requires_grad=False) for shape in shapes]


def resident_bytes() -> int:
    """Without the memory that earlier tests freed and a CPU worker's heap keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def bytes_of(tensor: Tensor, buffer: WeightBuffer) -> set[int]:
    """The positions in the buffer of each of a tensor's bytes, element by element."""
    start, size = buffer.storage.data_ptr(), tensor.element_size()
    found = set()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).reshape(-1, tensor.ndim).tolist():
        first = tensor[tuple(index)].data_ptr() - start
        found |= set(range(first, first + size))
    return found


def test_parameters_become_views_of_one_allocation_where_large_ones_have_pages_of_their_own():
    made = parameters((8,), (FLOATS, 2), (7,), (FLOATS + 1,))
    before = [parameter.clone() for parameter in made]
    buffer = WeightBuffer(made)
    low, high = buffer.storage.data_ptr(), buffer.storage.data_ptr() + buffer.storage.numel()
    assert all(torch.equal(parameter, value) for parameter, value in zip(made, before, strict=True))
    assert all(low <= parameter.data_ptr() < high for parameter in made)
    assert buffer.num_bytes == sum(value.nbytes for value in before)
    small, large = (made[0], made[2]), (made[1], made[3])
    assert {parameter.data_ptr() % PAGE for parameter in large} == {0}
    assert len({parameter.data_ptr() // PAGE for parameter in small}) == 1
    assert {parameter.data_ptr() % 64 for parameter in small} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut",
    [
        lambda matrix: matrix[0:0],
        lambda matrix: matrix[3:9],
        lambda matrix: matrix[:, : matrix.shape[1] // 4],
        lambda matrix: matrix[5:, 1:9],
        lambda matrix: matrix[::4],
        lambda matrix: matrix.view(4, -1, matrix.shape[1])[1:3, 2:, 5:7],
        lambda matrix: matrix,
    ],
)
def test_exactly_the_pages_without_a_kept_byte_are_freed(cut, dtype):
    """Against a list of every kept byte. Rows of three and a half pages, so that columns leave pages between them."""
    made = parameters((12, FLOATS * 7 // 2), (40,), dtype=dtype)
    buffer = WeightBuffer(made)
    kept = cut(made[0].data)
    before, positions = kept.clone(), bytes_of(kept, buffer) | bytes_of(made[1].data, buffer)
    released = buffer.release(kept=[kept, made[1].data, torch.ones(3)])
    assert torch.equal(kept, before)
    assert bool((made[1] >= 1).all())
    pages = {position // PAGE for position in positions}
    for page in range(buffer.storage.numel() // PAGE):
        assert bool(buffer.storage[page * PAGE : (page + 1) * PAGE].any()) == (page in pages)
    assert released.kept_bytes == len(positions)
    assert released.weight_bytes + released.kept_bytes + released.left_bytes == buffer.num_bytes
    assert (released.left_bytes == 0) == (kept.numel() in (0, made[0].numel()))


def test_pages_leave_the_process_and_return_when_they_are_written():
    made = parameters((64, MB // 4), (64, MB // 4))
    buffer = WeightBuffer(made)
    full = resident_bytes()
    released = buffer.release(kept=[made[0].data])
    assert (released.weight_bytes, released.kept_bytes, released.left_bytes) == (64 * MB, 64 * MB, 0)
    assert full - resident_bytes() > 60 * MB
    made[1].data.fill_(2.0)
    assert full - resident_bytes() < 4 * MB
    assert float(made[1].data[5, 5]) == 2.0


def test_weights_that_are_not_copied_in_take_no_memory_until_they_are_written():
    made = [nn.Parameter(torch.empty(64, MB // 4), requires_grad=False)]
    before = resident_bytes()
    WeightBuffer(made, copy=False)
    assert resident_bytes() - before < 4 * MB
    made[0].data.fill_(1.0)
    assert resident_bytes() - before > 60 * MB


def test_weights_that_cannot_be_freed_are_reported_once(caplog):
    """Every column block of a row-parallel matrix whose rows are shorter than a page keeps all its pages."""
    made = parameters((MB // 64, 512))
    buffer = WeightBuffer(made)
    for _ in range(2):
        released = buffer.release(kept=[made[0].data[:, :16]])
    assert released.weight_bytes == 0
    assert released.left_bytes == 31 * MB
    [record] = caplog.records
    assert "rollout.sleep" in record.getMessage() and "31 MB" in record.getMessage()


def test_outside_the_hosts_memory_all_weights_stay_without_a_warning(caplog):
    """On torch's meta device, which is not the host's memory either."""
    made = [nn.Parameter(torch.empty(MB, 16, device="meta"), requires_grad=False) for _ in range(2)]
    buffer = WeightBuffer(made)
    released = buffer.release(kept=[made[0].data])
    assert (released.weight_bytes, released.kept_bytes, released.left_bytes) == (0, 64 * MB, 64 * MB)
    assert caplog.records == []


def test_a_tensor_keeps_what_is_not_a_whole_page():
    numbers = torch.ones(5 * FLOATS)
    freed = free_pages(numbers[10:-10])
    kept = int(numbers.sum())
    assert freed == (5 * FLOATS - kept) * 4
    assert freed in (3 * PAGE, 4 * PAGE)
    assert numbers[:10].sum() == numbers[-10:].sum() == 10
    assert free_pages(torch.ones(3)) == free_pages(torch.ones(0)) == 0
