"""Checks that all nodes of a run share its storage by a round trip through it, before any model is loaded.

The driver writes a token into the run's directory; a process of each device reads it and writes it back; the driver
reads that. The same processes look for the models and the checkpoint that the run reads, and adopt the user's code.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from hybridflow.config.absolute_paths import model_directories
from hybridflow.config.carried_code import imported_user_files, keep_code
from hybridflow.config.storage_token import read_back, written_token
from hybridflow.controller.backends import Backend
from hybridflow.controller.futures import wait
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.elastic.checkpoint import Checkpoint
from hybridflow.elastic.storage import write_aside
from hybridflow.errors import ResourceError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.parallel.file_records import in_threads
from hybridflow.workers.storage_check import Expected, Sizes, StorageCheck, StorageReport, sizes_of

CODE_FOLDER = "code"
"""Below the run's directory: the Python files that define the user's functions."""

_RUN_DIR = "trainer.run_dir"


def read_directories(plan: RunPlan, checkpoint: Checkpoint | None) -> dict[str, tuple[Path, Sizes]]:
    """Paths that workers read, by the setting that names them: models, tokenizers, a checkpoint's path.

    Names on a hub are left out, and so is a checkpoint in the run's own directory.
    """
    models = [plan.policy, *(role.model for role in plan.roles if role.model is not None)]
    paths = {path for model in models for path in (model.path, model.tokenizer_path)}
    read = {key: directory for key, directory in model_directories(plan.config) if str(directory) in paths}
    if checkpoint is not None and not checkpoint.path.resolve().is_relative_to(plan.run_dir.resolve()):
        read["trainer.resume"] = checkpoint.path
    return {key: (directory, sizes_of(directory)) for key, directory in read.items()}


def meet_nodes(
    backend: Backend, pools: Mapping[str, ResourcePool], run_dir: Path, read: Mapping[str, tuple[Path, Sizes]]
) -> None:
    """Starts the pools' processes; raises `ResourceError` for the first that does not see the driver's files.

    `pools` has each pool by the name of a role in it.
    """
    code = run_dir / CODE_FOLDER
    with write_aside(code) as partial:
        keep_code(imported_user_files(), partial)
    with written_token(run_dir) as (meeting, token):
        expected = Expected(meeting, token, read, code, Path.cwd())
        groups = [WorkerGroup(StorageCheck, pool, backend, role=role) for role, pool in pools.items()]
        checks = [group.check(expected) for group in groups]
        wait(*checks)
        reports = [report for check in checks for report in _each(check.result())]
        problems = _problems(reports, meeting, token)
    if problems:
        raise _unseen(problems, run_dir, read)


def _problems(reports: Sequence[StorageReport], meeting: Path, token: str) -> list[tuple[str, str, str]]:
    """Node, setting and description of a problem, at most one per node."""
    found = {
        report.node: (report.node, *problem) for report in reversed(reports) for problem in report.problems.items()
    }
    if found:
        return list(found.values())
    unread = in_threads(lambda report: read_back(meeting / report.answer, token), reports, threads=32)
    written = {
        report.node: (report.node, _RUN_DIR, f"the driver cannot read what it wrote: {problem}")
        for report, problem in zip(reports, unread, strict=True)
        if problem is not None
    }
    return list(written.values())


def _unseen(
    problems: Sequence[tuple[str, str, str]], run_dir: Path, read: Mapping[str, tuple[Path, Sizes]]
) -> ResourceError:
    node, key, what = problems[0]
    others = [name for name, _, _ in problems[1:]]
    more = f" Nor do {', '.join(others[:4])}{' and others' if others[4:] else ''}." if others else ""
    path = run_dir if key == _RUN_DIR else read[key][0]
    share = f"Set {key} to a directory on storage that all nodes mount under the same path"
    copy = "" if key == _RUN_DIR else ", or copy it to that path on every node"
    hub = "; a name on the Hugging Face hub is downloaded by each node" if key.endswith("model.path") else ""
    return ResourceError(
        f"The node {node} does not see {key}={path} as the driver does: {what}.{more}", remedy=f"{share}{copy}{hub}."
    )


def _each(answer: object) -> list[StorageReport]:
    return cast(list[StorageReport], answer if isinstance(answer, list) else [answer])
