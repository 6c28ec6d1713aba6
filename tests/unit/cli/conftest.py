"""Toys for all tests of this folder."""

from tests.toys import toy_dir

__all__ = ["toy_dir"]
