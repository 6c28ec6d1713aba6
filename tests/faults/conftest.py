"""The Ray and the processes of the distributed tests."""

from tests.distributed.conftest import processes, ray_backend

__all__ = ["processes", "ray_backend"]
