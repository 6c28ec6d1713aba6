"""Chooses whether a run starts from a checkpoint or from scratch, and moves an earlier run aside."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridflow.config.paths import user_path
from hybridflow.config.stored_inputs import INPUTS_FOLDER, names
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore, step_of
from hybridflow.elastic.remote import RemoteCheckpoints
from hybridflow.errors import CheckpointError, ConfigError, ResourceError

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
FILES_OF_A_RUN = ("checkpoints", CONFIG_FILE, "metrics.jsonl", "run.log")
"""Names of which a run directory has at least one."""


def check_links(directory: Path) -> None:
    """Raises `ResourceError` if a directory or one of its parents is a broken symbolic link."""
    for link in (directory, *directory.absolute().parents):
        if os.path.islink(link) and not os.path.exists(link):
            raise ResourceError(
                f"trainer.run_dir: '{link}' is a symbolic link to '{os.readlink(link)}', which does not exist.",
                remedy="Mount the disk or create the directory that it points to, or remove the link.",
            )


def resolve_resume(
    resume: str,
    store: CheckpointStore,
    total_steps: int,
    remote: RemoteCheckpoints | None = None,
    *,
    check: Callable[[Checkpoint], object] = lambda checkpoint: None,
    only_described_in: Path | None = None,
) -> Checkpoint | None:
    """The checkpoint selected by `trainer.resume`: auto (the newest intact one), never (none), or a path.

    With auto, a later checkpoint of `remote` is copied to the store, after `check` has accepted its manifest and the
    driver's state; with `only_described_in`, only these two are copied, to that directory. Raises `CheckpointError` if
    the checkpoint has more than `total_steps` steps or, unless `resume` is auto, if `remote` has later checkpoints,
    from which the run would resume next time; and `ResourceError` if the checkpoints' directory is a broken symbolic
    link, for instance to a disk that is not mounted.
    """
    checkpoint = _own_checkpoint(resume, store)
    own_step = checkpoint.step if checkpoint is not None and store.is_own(checkpoint.path) else 0
    if remote is not None and resume != "auto" and (later := [step for step in remote.complete() if step > own_step]):
        raise CheckpointError(
            f"trainer.resume={resume}, but trainer.checkpoint_url={remote.url} has checkpoints of later steps, up to"
            f" {later[-1]}, from which the run would resume after an interruption.",
            remedy="Use another trainer.checkpoint_url, or delete these checkpoints.",
        )
    if remote is not None and resume == "auto":
        with TemporaryDirectory() as folder:
            newer = remote.newer_described(only_described_in or Path(folder), than=own_step)
            if newer is not None:
                _check_length(newer.step, remote.place(newer.step), store, total_steps)
                check(newer)
        if newer is not None and only_described_in is None:
            newer = remote.newer(store, than=own_step)
        checkpoint = newer or checkpoint
    if checkpoint is not None:
        _check_length(checkpoint.step, checkpoint.path, store, total_steps)
    return checkpoint


def _check_length(step: int, place: str | Path, store: CheckpointStore, total_steps: int) -> None:
    """Raises `CheckpointError` if a checkpoint has more than `total_steps` steps."""
    if step > total_steps:
        beyond = f"{place} is at step {step}, beyond trainer.total_steps={total_steps}."
        held = f"{store.run_dir} already holds a trained run (step {step}), so trainer.total_steps=0 cannot"
        raise CheckpointError(
            beyond if total_steps else f"{held} start there.",
            remedy=f"Set trainer.total_steps above {step}, or trainer.resume=never to start over."
            if total_steps
            else f"To evaluate it: hybridflow evaluate {store.run_dir}. To evaluate the untrained model:"
            " trainer.experiment=NAME.",
        )


def _own_checkpoint(resume: str, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint in the run directory, or at a path, that `trainer.resume` selects; None if there is none."""
    if resume == "never":
        return None
    check_links(store.directory)
    return store.latest() if resume == "auto" else store.open(user_path(resume, key="trainer.resume"))


def holds_run(run_dir: Path) -> bool:
    """Whether the directory holds an earlier run; raises `ConfigError` if it holds only other files."""
    found = run_dir.iterdir() if run_dir.is_dir() else []
    held = sorted(path.name for path in found if path.name != INPUTS_FOLDER)
    if held and not any(name in FILES_OF_A_RUN for name in held):
        raise ConfigError(
            f"trainer.run_dir={run_dir} contains files that are not a run's: {', '.join(held[:4])}.",
            remedy=f"Use an empty or new directory, such as trainer.run_dir={run_dir / 'run'}.",
        )
    return bool(held)


def set_aside(run_dir: Path) -> Path | None:
    """Renames a run directory that is not empty to `<run_dir>.<n>`, n the first free number; returns the new path.

    For a symbolic link, renames the target and keeps the link; `claim` creates the target again. Raises an error for a
    directory that does not hold a run, and for the current one.
    """
    if not holds_run(run_dir):
        return None
    directory = run_dir.resolve() if run_dir.is_symlink() else run_dir.absolute()
    aside = _free_name(directory)
    try:
        if Path.cwd().is_relative_to(run_dir.resolve()):
            raise OSError("it is or contains the current directory")
        os.rename(directory, aside)
    except OSError as error:
        raise ResourceError(
            f"trainer.run_dir={run_dir} holds an earlier run, which cannot be renamed to {aside}: {error}.",
            remedy="Use another trainer.run_dir, or move the earlier run away.",
        ) from error
    logger.warning("run_dir=%s held an earlier run, which is now in %s", run_dir, aside)
    return aside


def keep_inputs(aside: Path, run_dir: Path, config: str) -> None:
    """Gives a run the stored inputs that were renamed together with the earlier run; their files are shared.

    Leaves out those that `config`, the text of the run's configuration, does not name: they belong to other runs.
    """
    for folder in (aside / INPUTS_FOLDER).glob("*"):
        if names(config, folder):
            shutil.copytree(folder, run_dir / INPUTS_FOLDER / folder.name, copy_function=_linked, dirs_exist_ok=True)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)


def set_later_aside(store: CheckpointStore, checkpoint: Checkpoint) -> list[Path]:
    """Renames the store's checkpoints of later steps than the one resumed from, so that `auto` ignores them later.

    With `trainer.resume=<path>` they are no longer part of the run's history. They become `step_N.<n>` and are never
    deleted; returns the new paths.
    """
    moved = []
    for path in store.paths():
        if step_of(path) > checkpoint.step:
            moved.append(_free_name(path))
            os.rename(path, moved[-1])
            logger.warning("checkpoint=%s is later than the step resumed from; renamed to %s", path, moved[-1])
    return moved


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    return aside
