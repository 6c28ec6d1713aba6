"""What may be imported without torch is, `import hybridflow` is quick, and a run imports without collecting garbage."""

import subprocess
import sys
from fnmatch import fnmatch

from tests.architecture.source import ROOT, python_files

MOST_SECONDS = 0.3
HEAVY = ("torch", "ray", "transformers", "vllm", "tensordict")

TORCH_FREE = (
    "hybridflow",
    "hybridflow.errors",
    "hybridflow.optional",
    "hybridflow.process",
    "hybridflow.config*",
    "hybridflow.mapping*",
    "hybridflow.parallel*",
    "hybridflow.models.catalogue",
    "hybridflow.models.geometry",
    "hybridflow.elastic",
    "hybridflow.resharding",
    "hybridflow.resharding.plan",
    "hybridflow.resharding.grouping",
    "hybridflow.models.names*",
    "hybridflow.observability*",
    "hybridflow.engines.*.traits",
    "hybridflow.algorithms.catalogue",
    "hybridflow.launch.compose.compose",
    "hybridflow.launch.rules.parallelism",
    "hybridflow.launch.rules.packages",
    "hybridflow.trainer.main_*",
    "hybridflow.cli*",
    "hybridflow.doctor*",
)
NEED_TORCH = (
    "hybridflow.parallel.groups",
    "hybridflow.parallel.collectives",
    "hybridflow.observability.trackers.tensorboard",
    "hybridflow.observability.trackers.wandb",
    "hybridflow.observability.trackers.mlflow",
)

IMPORT_EACH = """
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {heavy!r} if heavy in sys.modules]
    if loaded:
        sys.exit(name + " brings " + ", ".join(loaded))
"""
TIME_IMPORT = "import time; start = time.perf_counter(); import hybridflow; print(time.perf_counter() - start)"
COLLECTIONS = """
import gc
from hybridflow.launch.command import ended_by_signals
found = []
with ended_by_signals():
    gc.callbacks.append(lambda phase, info: found.append(phase))
    import hybridflow.launch.execute, hybridflow.launch.prepare
    gc.callbacks.clear()
print(len(found))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)


def torch_free_modules() -> list[str]:
    """Every module of the package that promises to come without torch."""
    paths = [source.path for source in python_files() if source.path.startswith("hybridflow/")]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    promised = [name for name in names if any(fnmatch(name, pattern) for pattern in TORCH_FREE)]
    return sorted(set(promised) - set(NEED_TORCH))


def test_the_promised_modules_come_without_torch_and_ray():
    names = torch_free_modules()
    assert {"hybridflow.errors", "hybridflow.trainer.main_ppo", "hybridflow.trainer.main_sft"} <= set(names)
    answer = python(IMPORT_EACH.format(names=names, heavy=HEAVY))
    assert answer.returncode == 0, answer.stderr
    assert "json brings json" in python(IMPORT_EACH.format(names=["json"], heavy=("json",))).stderr  # it would be seen


def test_importing_the_package_is_quick():
    # The best of several: the machine may be busy, and only the quickest says what the import costs.
    seconds = []
    for _ in range(5):
        answer = python(TIME_IMPORT)
        assert answer.returncode == 0, answer.stderr
        seconds.append(float(answer.stdout))
    assert min(seconds) < MOST_SECONDS


def test_the_imports_of_a_run_collect_no_garbage():
    answer = python(COLLECTIONS)
    assert (answer.returncode, answer.stdout) == (0, "0\n"), answer.stderr
