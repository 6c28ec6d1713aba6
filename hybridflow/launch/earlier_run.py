"""The earlier run of a run directory: it stays as it was if the new run fails before its first step."""

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.elastic.claim import check_in_place
from hybridflow.errors import ResourceError
from hybridflow.observability.logs import LOG_FILE, configure_logging

logger = logging.getLogger(__name__)


@dataclass
class EarlierRun:
    """What the start of a run has changed in its directory, so that a failed start can undo it.

    `aside` is where the earlier run was moved, `later` are checkpoints that were renamed, and `files` are files that
    the start overwrites.
    """

    directory: Path
    aside: Path | None = None
    later: Sequence[Path] = ()
    files: dict[Path, bytes] = field(default_factory=dict)
    has_begun: bool = False
    is_restored: bool = False

    @property
    def can_be_restored(self) -> bool:
        """Whether there was an earlier run and the new one has not begun."""
        return not self.has_begun and bool(self.aside or self.files)

    def restore(self) -> bool:
        """Puts the earlier run back unless the new one has begun; returns whether there was one to put back."""
        if not self.can_be_restored:
            return False
        try:
            check_in_place(self.directory)
            self._restore()
        except (OSError, ResourceError) as error:
            logger.warning("run_dir=%s: its earlier run could not be put back: %s", self.directory, error)
            return False
        self.is_restored = True
        with suppress(ResourceError):  # run.log cannot be written: the line is shown all the same
            configure_logging(self.directory)
        if moved := [self.aside] if self.aside is not None else self.later:
            names = ", ".join(map(str, moved))
            logger.warning("run_dir=%s: the earlier run is back as it was, from %s", self.directory, names)
        return True

    def _restore(self) -> None:
        configure_logging(None)  # closes run.log, which may move to the end of the earlier one
        for path in self.later:
            os.rename(path, path.with_suffix(""))
        for path, content in self.files.items():
            path.write_bytes(content)
        if self.aside is not None:
            log = self.directory / LOG_FILE
            said = log.read_text(encoding="utf-8") if log.is_file() else ""
            directory = self.directory.resolve()  # of a symbolic link, the target was set aside
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(self.aside, directory)
            with (self.directory / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(said)
