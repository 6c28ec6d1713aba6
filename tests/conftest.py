"""Signatures of `hybridflow.algorithms` as checks, the same examples on every run, and skips for absent extras."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from hybridflow.observability.logs import logging_restored

EXTRAS = {
    "vllm": "vllm",
    "megatron": "megatron",
    "lora": "peft",
    "reasoning_gym": "reasoning_gym",
    "notebook": "nbclient",
}
"""Marks of tests that need an extra, and the package that it brings."""

WHOLE_FILES = {
    "megatron": ["unit/engines/training/megatron", "distributed/test_checkpoint_layouts.py", "gpu/test_experts.py"],
    "lora": [
        "unit/engines/training/test_lora.py",
        "unit/models/adapters",
        "unit/workers/test_lora_actor.py",
        "parity/test_lora_sharded.py",
        "distributed/test_lora_hybrid.py",
        "distributed/test_lora_runs.py",
    ],
}
"""Files that import what an extra brings."""

ABSENT = {mark: package for mark, package in EXTRAS.items() if find_spec(package) is None}
collect_ignore = [path for mark in ABSENT for path in WHOLE_FILES.get(mark, [])]

# pep484_tower: an int is accepted where a float is asked for.
jaxtyping.install_import_hook(
    "hybridflow.algorithms", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

# The same examples on every run, and no time limit for one: the machine may be busy.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """A command that runs in the tests' process sets up logging; the next test finds it as it was."""
    with logging_restored():
        yield


def pytest_report_header() -> list[str]:
    """Says which tests are left out for want of an extra."""
    return [f"without {package}: tests of the extra '{mark}' are left out" for mark, package in ABSENT.items()]


@cache
def shares_ray(file: Path) -> bool:
    """Whether a test file uses the session's Ray, of which each worker of pytest-xdist would start its own."""
    return "ray_backend" in file.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n`, a worker takes whole files, in the order of collection, and one worker all files that share Ray."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ray_backend" if shares_ray(config.rootpath / file) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that share Ray come first: they take one worker longest. Tests whose extra is not installed are skipped.

    So are tests of another library's environments, unless they are what was asked for (`-m library`).
    """
    items.sort(key=lambda item: not shares_ray(item.path))
    for item in items:
        for mark, package in ABSENT.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(
                    pytest.mark.skip(reason=f"{package} is not installed (the extra '{mark.replace('_', '-')}')")
                )
        for mark in () if config.option.markexpr == "library" else item.iter_markers("library"):
            if find_spec(mark.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]} is not installed (make adapters)"))
