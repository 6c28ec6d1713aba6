"""Programs that see a file system of their own."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_with_mount(mount: str, program: str, argument: Path) -> str:
    """Runs a Python program after a mount that it alone sees, and returns its log; skips without the right to mount."""
    alone = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    command = f"{mount} && {shlex.join([sys.executable, '-c', program, str(argument)])}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*alone, command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
