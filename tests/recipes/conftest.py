"""Toys, commands in processes of their own, and one Ray, for all tests of this folder."""

from tests.distributed.conftest import processes, ray_backend
from tests.toys import toy_dir

__all__ = ["processes", "ray_backend", "toy_dir"]
