"""Libraries and the user's files, which may lie below the prefix of the installation."""

import importlib.util
import json
import sys

import numpy
import pytest

from hybridflow.config.installed import is_installed
from hybridflow.config.reward import __file__ as ours


@pytest.mark.parametrize(
    "file",
    [
        json.__file__,
        numpy.__file__,
        ours,
        importlib.util.__file__,
        "<frozen importlib._bootstrap>",
        "/usr/lib/python3/dist-packages/yaml/__init__.py",
        f"{sys.base_prefix}/lib/python3/site-packages/a/b.py",
    ],
)
def test_the_standard_library_installed_packages_and_this_package_are_installed(file):
    assert is_installed(file)


@pytest.mark.parametrize(
    "file",
    [
        __file__,
        "/data/project/reward.py",
        "reward.py",
        "<stdin>",
        f"{sys.base_prefix}/src/project/reward.py",
        f"{sys.prefix}/src/project/reward.py",
        f"{json.__file__.removesuffix('/json/__init__.py')}-mine/reward.py",
    ],
)
def test_a_users_file_is_not_installed_wherever_it_lies(file):
    assert not is_installed(file)
