"""The import contracts of pyproject.toml hold, and each of them breaks on the import it forbids."""

import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from tests.architecture.source import ROOT, python_files

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

FORBIDDEN_IMPORTS = (
    ("floors", "config/checks.py", "hybridflow.batch"),
    ("floors", "engines/training/single.py", "hybridflow.workers.actor"),
    ("floors", "rewards/answers.py", "hybridflow.data"),
    ("floors", "data/loader.py", "hybridflow.controller"),
    ("floors", "errors.py", "hybridflow.optional"),
    ("launch", "launch/compose/compose.py", "hybridflow.launch.plan.plan"),
    ("launch", "launch/plan/roles.py", "hybridflow.launch.rules.all"),
    ("launch", "launch/rules/models.py", "hybridflow.launch.prepare"),
    ("dataflows", "dataflows/ppo.py", "hybridflow.workers.actor"),
    ("dataflows", "dataflows/loop.py", "hybridflow.engines"),
    ("algorithms", "algorithms/kl.py", "hybridflow.config"),
    ("algorithms", "algorithms/kl.py", "transformers"),
    ("torch-free", "config/model.py", "torch.nn"),
    ("torch-free", "observability/metrics.py", "torch"),
    ("torch-free", "launch/compose/files.py", "torch"),
    ("ray", "controller/worker_group.py", "ray"),
    ("ray", "launch/cluster.py", "ray.util"),
    ("vllm", "workers/rollout.py", "vllm"),
    ("hydra", "config/experiment.py", "hydra.core.config_store"),
    ("megatron", "engines/training/single.py", "megatron.core"),
    ("elsewhere", "observability/trackers/console.py", "wandb"),
    ("siblings", "data/one.py", "hybridflow.data.two"),
    ("siblings", "data/two.py", "hybridflow.data.one"),
)


def write(package: Path, path: str, text: str) -> None:
    """A module of the copy, with the packages above it."""
    target = package / path
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in [target.parent, *target.parent.parents]:
        if folder.is_relative_to(package):
            (folder / "__init__.py").touch()
    target.write_text(text + "\n", encoding="utf-8")


def empty_copy(folder: Path) -> Path:
    """The tree of the package with empty modules, under the real contracts."""
    for source in python_files():
        if source.path.startswith("hybridflow/"):
            write(folder / "hybridflow", source.path.removeprefix("hybridflow/"), "")
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def report(folder: Path) -> str:
    """What import-linter says of the package in this folder."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    wide = os.environ | {"COLUMNS": "200"}  # so that no contract's name is broken over two lines
    command += ["--no-cache", "--no-logo"]
    answer = subprocess.run(command, cwd=folder, env=wide, check=False, capture_output=True, text=True)
    broken = sum(f"{contract['name']} BROKEN" in answer.stdout for contract in CONTRACTS)
    assert f"{len(CONTRACTS) - broken} kept, {broken} broken" in answer.stdout, answer.stdout + answer.stderr
    assert (answer.returncode == 0) is (broken == 0)
    return answer.stdout


def test_the_package_keeps_its_contracts():
    assert " 0 broken" in report(ROOT)


def test_every_contract_breaks_on_the_imports_that_it_forbids(tmp_path):
    package = empty_copy(tmp_path) / "hybridflow"
    texts = defaultdict(list)
    for _, path, imported in FORBIDDEN_IMPORTS:
        texts[path].append(f"import {imported}")
    for path, lines in texts.items():
        write(package, path, "\n".join(lines))
    write(package, "newroom/__init__.py", "")
    _, *parts = re.split(r"\n([^\n]+)\n-{5,}\n", report(tmp_path).partition("Broken contracts")[2])
    names = {contract["id"]: contract["name"] for contract in CONTRACTS}
    broken = dict(zip(parts[::2], parts[1::2], strict=True))
    assert broken.keys() == set(names.values())
    for contract, path, imported in FORBIDDEN_IMPORTS:
        module = f"hybridflow.{path.removesuffix('.py').replace('/', '.')}"
        target = imported if imported.startswith("hybridflow") else imported.partition(".")[0]
        expected = f"{module} -> {target}" if contract != "siblings" else "No cycles are allowed in hybridflow.data."
        assert expected in broken[names[contract]]
    assert "newroom" in broken[names["floors"]]
