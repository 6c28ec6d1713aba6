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

    The one just written always stays, and with it the only whole one. Whole is judged by sizes here, not contents.
    """
    whole = [path for path in paths if path == just_written or _is_whole(path)]
    oldest_kept = whole[-max(keep, 1) :][0]
    expired = [path for path in paths[: paths.index(oldest_kept)] if path != just_written]
    for path in expired:
        delete(path)
        logger.info("checkpoint=%s deleted keep_checkpoints=%d", path, keep)
    return expired


def _is_whole(path: Path) -> bool:
    try:
        verify(path, full=False)
    except CheckpointError:
        return False
    return True
