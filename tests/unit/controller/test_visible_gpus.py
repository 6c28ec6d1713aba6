"""Which of the visible GPUs a worker's own is."""

import pytest

from hybridflow.controller.backends.ray.host import visible_index


@pytest.mark.parametrize(
    ("gpu", "visible", "index"),
    [("3", None, 3), ("3", "", 3), ("6", "2,3,6,7", 2), ("GPU-b", "GPU-a,GPU-b", 1)],
)
def test_a_gpu_is_counted_among_the_visible_ones(gpu, visible, index):
    assert visible_index(gpu, visible) == index
