"""Which checkpoints are kept: the newest whole ones."""

import logging
from collections.abc import Sequence
from pathlib import Path

from hybridflow.elastic.manifest import verify
from hybridflow.elastic.storage import delete
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)


def prune(paths: Sequence[Path], *, keep: int, just_written: Path) -> list[Path]:
    """Delete the checkpoints older than the newest `keep` whole ones, and return them; `paths` go oldest first.

    The one just written always stays, and with it the only whole one. Whole is judged by sizes here, not contents. Of a
    symbolic link only the link is deleted. A checkpoint that cannot be deleted stays, with a warning.
    """
    whole = [path for path in paths if path == just_written or is_whole(path)]
    oldest_kept = whole[-max(keep, 1) :][0]
    expired = [path for path in paths[: paths.index(oldest_kept)] if path != just_written]
    return [path for path in expired if _is_deleted(path, keep)]


def _is_deleted(path: Path, keep: int) -> bool:
    target = path.resolve() if path.is_symlink() else None
    try:
        delete(path)
    except OSError as error:
        logger.warning("checkpoint=%s could not be deleted: %s keep_checkpoints=%d", path, error, keep)
        return False
    if target is None:
        logger.info("checkpoint=%s deleted keep_checkpoints=%d", path, keep)
    else:
        logger.info("checkpoint=%s was a symbolic link: the link is deleted, %s stays", path, target)
    return True


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has all files of its manifest at their sizes; contents are not read."""
    try:
        verify(path, full=False)
    except CheckpointError:
        return False
    return True
