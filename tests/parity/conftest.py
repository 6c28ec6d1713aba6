"""Toys for all tests of this folder, and what one device makes of them."""

import pytest

from tests.parity.divided import OnOneDevice
from tests.toys import toy_dir

__all__ = ["plain", "toy_dir"]


@pytest.fixture(scope="module")
def plain() -> OnOneDevice:
    """A function: case -> the same on one device, trained once."""
    return OnOneDevice()
