"""Toys for all tests of engines."""

from tests.toys import toy_dir

__all__ = ["toy_dir"]
