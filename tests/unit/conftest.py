"""Toys for all unit tests, made once."""

from tests.toys import toy_dir

__all__ = ["toy_dir"]
