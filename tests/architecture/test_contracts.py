"""The import contracts of pyproject.toml hold, and each of them breaks on the import it forbids."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, python_files

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

FORBIDDEN_IMPORTS = (
    ("floors", "config/checks.py", "import hybridflow.batch"),
    ("floors", "engines/training/single.py", "from hybridflow.workers import actor"),
    ("floors", "rewards/answers.py", "import hybridflow.data"),
    ("floors", "data/loader.py", "import hybridflow.controller"),
    ("floors", "errors.py", "import hybridflow.optional"),
    ("floors", "newroom/__init__.py", ""),
    ("dataflows", "dataflows/ppo.py", "from hybridflow.workers import actor"),
    ("dataflows", "dataflows/loop.py", "import hybridflow.engines"),
    ("algorithms", "algorithms/kl.py", "import hybridflow.config"),
    ("algorithms", "algorithms/kl.py", "from transformers import AutoModel"),
    ("torch-free", "config/model.py", "import torch.nn"),
    ("torch-free", "observability/metrics.py", "from torch import Tensor"),
    ("siblings", "data/one.py", "import hybridflow.data.two", "data/two.py", "import hybridflow.data.one"),
    ("ray", "controller/worker_group.py", "import ray"),
    ("ray", "launch/cluster.py", "from ray.util import placement_group"),
    ("vllm", "workers/rollout.py", "from vllm import LLM"),
    ("hydra", "config/experiment.py", "from hydra.core.config_store import ConfigStore"),
    ("megatron", "engines/training/single.py", "from megatron.core import parallel_state"),
    ("elsewhere", "observability/trackers/fanout.py", "import wandb"),
)


def write(package: Path, path: str, text: str) -> None:
    """A module of the copy, with the packages above it."""
    target = package / path
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in [target.parent, *target.parent.parents]:
        if folder.is_relative_to(package):
            (folder / "__init__.py").touch()
    target.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def empty_copy(tmp_path):
    """The tree of the package with empty modules, under the real contracts."""
    for source in python_files():
        if source.path.startswith("hybridflow/"):
            write(tmp_path / "hybridflow", source.path.removeprefix("hybridflow/"), "")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def broken_contracts(folder: Path) -> set[str]:
    """The identifiers of the contracts that the package in this folder breaks."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    wide = os.environ | {"COLUMNS": "200"}  # so that no contract's name is broken over two lines
    command += ["--no-cache", "--no-logo"]
    answer = subprocess.run(command, cwd=folder, env=wide, check=False, capture_output=True, text=True)
    verdicts = {contract["id"]: f"{contract['name']} BROKEN" in answer.stdout for contract in CONTRACTS}
    assert f"{len(CONTRACTS) - sum(verdicts.values())} kept, {sum(verdicts.values())} broken" in answer.stdout, (
        answer.stdout + answer.stderr
    )
    if folder == ROOT:
        assert answer.returncode == 0, answer.stdout
    return {identifier for identifier, broken in verdicts.items() if broken}


def test_the_package_keeps_its_contracts():
    assert broken_contracts(ROOT) == set()


def test_an_empty_copy_keeps_the_contracts(empty_copy):
    assert broken_contracts(empty_copy) == set()


@pytest.mark.parametrize("case", FORBIDDEN_IMPORTS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_forbidden_import_breaks_its_contract(empty_copy, case):
    contract, *modules = case
    for path, text in zip(modules[::2], modules[1::2], strict=True):
        write(empty_copy / "hybridflow", path, text)
    assert contract in broken_contracts(empty_copy)


def test_every_contract_is_tried():
    assert {case[0] for case in FORBIDDEN_IMPORTS} == {contract["id"] for contract in CONTRACTS}
