"""The room is light: nothing heavy is imported by importing it."""

import subprocess
import sys

_IMPORT_ALL = """
import importlib, pkgutil, sys
import hybridflow.observability as room
optional = ("trackers.tensorboard", "trackers.wandb", "trackers.mlflow")
for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    if not module.name.endswith(optional):
        importlib.import_module(module.name)
heavy = {"torch", "ray", "matplotlib", "tensorboard", "wandb", "mlflow", "numpy", "omegaconf", "hydra"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or None)
"""


def test_importing_the_room_imports_nothing_heavy():
    outcome = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
