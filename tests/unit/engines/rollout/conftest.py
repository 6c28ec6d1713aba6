"""Toys for the tests of rollout engines."""

from tests.toys import toy_dir

__all__ = ["toy_dir"]
