"""Toys and one Ray for all tests of this folder."""

from tests.distributed.conftest import ray_backend
from tests.toys import toy_dir

__all__ = ["ray_backend", "toy_dir"]
