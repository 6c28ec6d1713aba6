"""Where a run begins: at a checkpoint or from the start, and what becomes of what is in its way."""

import logging
import os
from pathlib import Path

from hybridflow.config.paths import user_path
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.errors import CheckpointError, ConfigError, ResourceError

logger = logging.getLogger(__name__)

_OF_A_RUN = ("checkpoints", "config.yaml", "metrics.jsonl", "run.log")


def check_links(directory: Path) -> None:
    """Raises `ResourceError` for a directory that is, or lies below, a symbolic link to nothing."""
    for link in (directory, *directory.absolute().parents):
        if os.path.islink(link) and not os.path.exists(link):
            raise ResourceError(
                f"trainer.run_dir: '{link}' is a symbolic link to '{os.readlink(link)}', which does not exist.",
                remedy="Mount the disk or create the directory that it points to, or remove the link.",
            )


def resolve_resume(resume: str, store: CheckpointStore, total_steps: int) -> Checkpoint | None:
    """The checkpoint that `trainer.resume` means: auto (the newest whole one), never (none), or a path.

    Raises `CheckpointError` for a run that has done more steps than that, and `ResourceError` if the directory of the
    checkpoints is a symbolic link to nothing, such as to a disk that is not mounted.
    """
    if resume == "never":
        return None
    check_links(store.directory)
    checkpoint = store.latest() if resume == "auto" else store.open(user_path(resume, key="trainer.resume"))
    if checkpoint is None:
        return None
    if checkpoint.step > total_steps:
        raise CheckpointError(
            f"{checkpoint.path} is at step {checkpoint.step}, beyond trainer.total_steps={total_steps}.",
            remedy=f"Set trainer.total_steps above {checkpoint.step}, or trainer.resume=never to start over.",
        )
    return checkpoint


def warn_of_complete(checkpoint: Checkpoint, total_steps: int) -> None:
    """Warns of a run that has done all its steps, once nothing else keeps it from resuming."""
    if checkpoint.step == total_steps:
        logger.warning(
            "checkpoint=%s has all of trainer.total_steps=%d: raise it to go on, or set trainer.resume=never to start"
            " over.",
            checkpoint.path,
            total_steps,
        )


def set_aside(run_dir: Path) -> Path | None:
    """Rename a run directory that is not empty to `<run_dir>.<n>`, n the first free number, and return that name.

    Of a symbolic link, the target is renamed beside itself, and the link stays: `claim` makes the target again. Only a
    directory that holds a run is moved: of any other, and of the current one, nothing is touched.
    """
    held = sorted(path.name for path in run_dir.iterdir()) if run_dir.is_dir() else []
    if not held:
        return None
    if not any(name in _OF_A_RUN for name in held):
        raise ConfigError(
            f"trainer.run_dir={run_dir} holds other files than a run's: {', '.join(held[:4])}.",
            remedy=f"Name a directory that is empty or new, such as trainer.run_dir={run_dir / 'run'}.",
        )
    directory = run_dir.resolve() if run_dir.is_symlink() else run_dir.absolute()
    aside = _free_name(directory)
    try:
        if Path.cwd().is_relative_to(run_dir.resolve()):
            raise OSError("it is the current directory, or holds it")
        os.rename(directory, aside)
    except OSError as error:
        raise ResourceError(
            f"trainer.run_dir={run_dir} holds an earlier run, which cannot be renamed to {aside}: {error}.",
            remedy="Name another trainer.run_dir, or move what is in it away.",
        ) from error
    logger.warning("run_dir=%s held an earlier run, which is now in %s", run_dir, aside)
    return aside


def set_later_aside(store: CheckpointStore, checkpoint: Checkpoint) -> list[Path]:
    """Rename the store's checkpoints that are not before the one resumed from, so that no later `auto` takes them.

    For a `trainer.resume=<path>`: from then on the run has another history. Where the path lies outside the store,
    that is all of the store's. They become `step_N.<n>`, which nothing deletes; returns their new names.
    """
    linked = checkpoint.path.resolve() in {path.resolve() for path in store.paths()}
    own = linked or checkpoint.path.parent.resolve() == store.directory.resolve()
    before = {path.resolve() for path in store.paths() if own and _step(path) <= checkpoint.step}
    moved = []
    for path in store.paths():
        if path.resolve() not in before:
            moved.append(_free_name(path))
            os.rename(path, moved[-1])
            logger.warning("checkpoint=%s is of another history and is now %s", path, moved[-1])
    return moved


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    return aside
