"""Opens the directory of a run, and restores its earlier contents if the run fails before its first step."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.claim import check_in_place, check_unclaimed, claim, hold, release
from hybridflow.elastic.compatibility import Fingerprints
from hybridflow.elastic.remote import RemoteCheckpoints, remote_checkpoints
from hybridflow.elastic.resuming import CONFIG_FILE, holds_run, keep_inputs, resolve_resume, set_aside, set_later_aside
from hybridflow.errors import CheckpointError, ResourceError
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.plan.data import RunData
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.resume import Changes, check_resumable, fingerprints
from hybridflow.observability.ending import UNRECORDED, is_unrecorded
from hybridflow.observability.logs import LOG_FILE, configure_logging
from hybridflow.observability.whole_files import replace_file

logger = logging.getLogger(__name__)


@dataclass
class EarlierRun:
    """The changes that the start of a run made in its directory, so that a failed start can undo them.

    `aside` is the new path of the earlier run, `later` are renamed checkpoints, and `files` are files that
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
        """Restores the earlier run unless the new one has begun; returns whether there was one to restore."""
        if not self.can_be_restored:
            return False
        try:
            check_in_place(self.directory)
            self._restore()
        except (OSError, ResourceError) as error:
            logger.warning("run_dir=%s: its earlier run could not be restored: %s", self.directory, error)
            return False
        self.is_restored = True
        with suppress(ResourceError):  # run.log cannot be written; the line is still shown
            configure_logging(self.directory)
        if moved := [self.aside] if self.aside is not None else self.later:
            names = ", ".join(map(str, moved))
            logger.warning("run_dir=%s: the earlier run is restored, from %s", self.directory, names)
        return True

    def _restore(self) -> None:
        configure_logging(None)  # closes run.log, which may move to the end of the earlier one
        for path in self.later:
            os.rename(path, path.with_suffix(""))
        for path, content in self.files.items():
            path.write_bytes(content)
        if self.aside is not None:
            log = self.directory / LOG_FILE
            lines = log.read_text(encoding="utf-8") if log.is_file() else ""
            directory = self.directory.resolve()  # of a symbolic link, the target was set aside
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(self.aside, directory)
            with log.open("a", encoding="utf-8") as file:
                file.write(lines)


def open_directory(plan: RunPlan, data: RunData, inputs: Fingerprints) -> tuple[Checkpoint | None, EarlierRun]:
    """Opens the run directory, claimed for this process, with its log and configuration.

    Returns the checkpoint to resume from, and the earlier contents of the directory.
    """
    claim(plan.run_dir)
    earlier = EarlierRun(plan.run_dir)
    try:
        return _opened(earlier, plan, data, inputs), earlier
    except BaseException:
        earlier.restore()
        release(plan.run_dir)
        raise


def start_in_words(plan: RunPlan, data: RunData | None) -> str:
    """Describes how the start of the run would treat the contents of its directory; changes nothing there.

    Raises `HybridflowError` if the start would be refused. Without data, whether a checkpoint fits is not checked.
    """
    trainer, directory = plan.config.trainer, plan.run_dir
    check_unclaimed(directory)
    store, remote = CheckpointStore(directory), remote_checkpoints(trainer)
    if remote is not None:
        remote.check()
    start = "begins at step 1" if trainer.total_steps else "evaluates the model without training"
    with TemporaryDirectory() as folder:
        described = Path(folder)
        with _with_url_in_remedies(remote):
            checkpoint = resolve_resume(trainer.resume, store, trainer.total_steps, remote, only_described_in=described)
            if checkpoint is not None and data is not None:
                check_resumable(checkpoint, plan, data, fingerprints(plan))
    is_there = remote is not None and checkpoint is not None and checkpoint.path == described
    if checkpoint is not None:
        place = remote.place(checkpoint.step) if remote is not None and is_there else checkpoint.path
        complete = " (the last one: nothing is left to do)" if checkpoint.step == trainer.total_steps else ""
        start = f"resumes from step {checkpoint.step}{complete}, {place}"
    continues = checkpoint is not None and (is_there or store.is_own(checkpoint.path))
    if continues or not holds_run(directory):
        return start
    return f"{start}; the earlier run in {directory} is moved aside"


@contextmanager
def _with_url_in_remedies(remote: RemoteCheckpoints | None) -> Iterator[None]:
    """Adds to the remedy `trainer.resume=never` of an error that it also needs another URL, if the run has one."""
    try:
        yield
    except CheckpointError as error:
        for each in (error, *error.further):
            if remote is not None and "trainer.resume=never" in each.remedy:
                each.remedy += f" With trainer.resume=never, also use another trainer.checkpoint_url: {remote.url} has"
                each.remedy += " checkpoints of the earlier run."
        raise


def _opened(earlier: EarlierRun, plan: RunPlan, data: RunData, inputs: Fingerprints) -> Checkpoint | None:
    trainer, directory = plan.config.trainer, earlier.directory
    store, remote = CheckpointStore(directory), remote_checkpoints(trainer)
    store.settle()
    if remote is not None:
        remote.check()
    with _with_url_in_remedies(remote):
        checkpoint = resolve_resume(
            trainer.resume,
            store,
            trainer.total_steps,
            remote,
            check=lambda described: check_resumable(described, plan, data, inputs),
        )
    if is_unrecorded(directory):
        logger.warning("run_dir=%s: the earlier run here failed: %s", directory, UNRECORDED.said.partition(". What")[0])
    changes = Changes()
    if checkpoint is not None:
        hold(checkpoint.path)
        with _with_url_in_remedies(remote):
            changes = check_resumable(checkpoint, plan, data, inputs)
        if checkpoint.step == trainer.total_steps:
            logger.warning("the run is complete: checkpoint=%s has all of trainer.total_steps=%d: raise it to continue,"
                           " or set trainer.resume=never to start over", checkpoint.path, checkpoint.step)  # fmt: skip
    if checkpoint is not None and store.is_own(checkpoint.path):
        earlier.later = set_later_aside(store, checkpoint)
        earlier.files = {path: path.read_bytes() for path in [directory / CONFIG_FILE] if path.is_file()}
    elif (aside := set_aside(directory)) is not None:  # its contents belong to another run
        earlier.aside = aside
        claim(directory)
        keep_inputs(aside, directory, config_text(plan.composed))
    configure_logging(directory)
    changes.log()
    replace_file(directory / CONFIG_FILE, config_text(plan.composed))
    return checkpoint
