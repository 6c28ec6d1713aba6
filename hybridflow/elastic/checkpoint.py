"""Checkpoints of a run in `run_dir/checkpoints/step_N`: saved atomically, found again, verified, deleted."""

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hybridflow.elastic import driver_state as json_state
from hybridflow.elastic.claim import is_held
from hybridflow.elastic.kill_points import kill_point
from hybridflow.elastic.manifest import DRIVER_STATE, MANIFEST, Manifest, Parts, verify, write_manifest
from hybridflow.elastic.retention import Retention
from hybridflow.elastic.storage import delete, settle, write_aside
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file is as it was written."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return self.manifest.step

    def driver_state(self) -> dict:
        """The driver's state exactly as given to `save`, plus the `step`."""
        return json_state.loads((self.path / DRIVER_STATE).read_text())

    def check_parts(self, roles: Collection[str]) -> None:
        """Raises `CheckpointError` if the checkpoint lacks a role that the run loads."""
        missing = sorted(set(roles) - set(self.manifest.parts))
        if missing:
            raise CheckpointError(
                f"{self.path} has no state of the role '{missing[0]}'; it has: {', '.join(self.manifest.parts)}.",
                remedy="Use the roles with which the run was started, or start over with trainer.resume=never.",
            )


class CheckpointStore:
    """The checkpoints of one run.

        store = CheckpointStore(run_dir, keep=Retention(latest=2))
        store.save(40, write=lambda directory: {"actor": records_of_what_was_written}, driver_state={})
        checkpoint = store.latest()              # None, or fully verified

    Only one process at a time may write to a run's directory.
    """

    def __init__(self, run_dir: Path, *, keep: Retention | None = None, world: int = 1) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoints"
        self.keep = keep or Retention()
        self.world = world

    def save(self, step: int, write: Callable[[Path], Parts], driver_state: dict) -> Path:
        """Writes a checkpoint and returns its path; then deletes those that `keep` does not keep.

        `write` fills the directory it is given, where each worker saves its own files, and returns what each role
        wrote. The checkpoint appears only when all of it is on disk and visible to this process. If anything fails,
        earlier checkpoints are unchanged.
        """
        state = json_state.dumps(driver_state | {"step": step})
        final = self.place(step)
        with write_aside(final) as partial:
            kill_point("write_begun")
            parts = write(partial)
            kill_point("parts_written")
            (partial / DRIVER_STATE).write_text(state)
            kill_point("before_manifest")
            write_manifest(partial, parts, step=step, world=self.world)
        self._prune(just_written=final)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; skips damaged ones with a warning. Does not change the directory."""
        for path in reversed(self.paths()):
            try:
                return self.open(path)
            except CheckpointError as error:
                logger.warning("checkpoint=%s is skipped: %s", path, error.message)
        return None

    def whole(self, path: Path) -> Checkpoint:
        """The checkpoint in a directory or, if it is damaged, the newest intact one of the run."""
        try:
            return self.open(path)
        except CheckpointError:
            if (older := self.latest()) is None:
                raise
            return older

    def settle(self) -> None:
        """Cleans up after a killed save; only for the process that has claimed the run's directory."""
        settle(self.directory)

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint in a directory, fully verified; raises a `CheckpointError` that names damaged files."""
        if not (path / MANIFEST).exists():
            found = f"{path} is not a checkpoint: it has no {MANIFEST}."
            if not path.exists():
                found = f"The checkpoint {path} does not exist."
            advice = "Give a step_N directory with a manifest.json as trainer.resume, or use trainer.resume=auto"
            inside = steps_below(path) or steps_below(path / "checkpoints") or steps_below(path.parent) or self.paths()
            raise CheckpointError(found, remedy=f"{advice}. Nearest: {inside[-1]}." if inside else f"{advice}.")
        checkpoint = Checkpoint(path, verify(path))
        step, named, saved = checkpoint.step, named_step(path.name), _saved_state(path).get("step")
        for what, found in (("its name", step if named is None else named), (DRIVER_STATE, saved)):
            if found != step:
                raise CheckpointError(
                    f"{path} is damaged: {what} says step {found}, its manifest step {step}.",
                    remedy="Rename it to the name under which it was saved, or use another checkpoint of the run.",
                )
        return checkpoint

    def place(self, step: int) -> Path:
        """The directory of the checkpoint of a step, which need not exist."""
        return self.directory / step_name(step)

    def paths(self) -> list[Path]:
        """The `step_N` directories, oldest first, including damaged ones."""
        return steps_below(self.directory)

    def is_own(self, path: Path) -> bool:
        """Whether a checkpoint belongs to this run, even if `checkpoints` or `step_N` is a symbolic link."""
        roots = {found.resolve() for found in (self.run_dir, self.directory, *self.paths())}
        places = (path.resolve(), path.parent.resolve() / path.name)
        return any(place.is_relative_to(root) for place in places for root in roots)

    def newest_whole(self) -> Path | None:
        """The newest checkpoint whose files have the right sizes, without reading their contents."""
        return next((path for path in reversed(self.paths()) if _is_intact(path)), None)

    def _prune(self, *, just_written: Path) -> None:
        """Deletes intact checkpoints that are not kept, and damaged ones older than the latest that are.

        Never deletes the one just written, nor one that a run is resuming from. Deletes a symbolic link, but not its
        target. A checkpoint that cannot be deleted stays, with a warning.
        """
        steps = {step_of(path): path for path in self.paths()}
        evaluations = {step: evaluation_of(path) for step, path in steps.items() if _is_intact(path)}
        evaluations[step_of(just_written)] = evaluation_of(just_written)
        kept = self.keep.kept(evaluations)
        oldest = sorted(evaluations)[-max(self.keep.latest, 1) :][0]
        for step, path in steps.items():
            is_expired = step not in kept and (step in evaluations or step < oldest)
            if is_expired and path != just_written:
                _delete(path)


def _delete(path: Path) -> None:
    target = path.resolve() if path.is_symlink() else None
    if is_held(path):
        logger.info("checkpoint=%s is being loaded, and will be deleted after a later save", path)
        return
    try:
        delete(path)
    except OSError as error:
        logger.warning("checkpoint=%s could not be deleted: %s", path, error)
    else:
        logger.info(
            "checkpoint=%s %s", path, "deleted" if target is None else f"was a link to {target}: deleted the link"
        )


def step_name(step: int) -> str:
    """The name of the directory with the checkpoint of a step."""
    return f"step_{step}"


def named_step(name: str) -> int | None:
    """The step in the name of such a directory; None for other names."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    step = named_step(path.name)
    assert step is not None, f"{path} is not the directory of a checkpoint"
    return step


def evaluation_of(path: Path) -> dict[str, float]:
    """The metrics of the evaluation at the step of a checkpoint; empty if there was none."""
    state = _saved_state(path)
    evaluation, evaluated = state.get("evaluation"), state.get("evaluated")
    is_own = isinstance(evaluated, list) and evaluated[-1:] == [state.get("step")]
    return evaluation if is_own and isinstance(evaluation, dict) else {}


def saved_config(path: Path) -> dict[str, object]:
    """The settings in a checkpoint, without verifying it; empty if they cannot be read."""
    found = _saved_state(path).get("config")
    return found if isinstance(found, dict) else {}


def _saved_state(path: Path) -> dict[str, object]:
    """The driver's state in a checkpoint, without verifying it; empty if it cannot be read."""
    try:
        found = json_state.loads((path / DRIVER_STATE).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def steps_below(directory: Path) -> list[Path]:
    """The `step_N` directories in a directory, by step."""
    if not directory.is_dir():
        return []
    numbered = [(named_step(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return [path for _, path in sorted((step, path) for step, path in numbered if step is not None)]


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint has all files of its manifest, with the right sizes."""
    try:
        verify(path, full=False)
    except CheckpointError:
        return False
    return True
