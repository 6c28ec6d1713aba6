"""Checkpoints of the whole run, in `run_dir/checkpoints/step_N`: saved whole, found again, verified."""

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hybridflow.elastic import driver_state as json_state
from hybridflow.elastic.faults import fault_point
from hybridflow.elastic.manifest import MANIFEST, Manifest, Parts, verify, write_manifest
from hybridflow.elastic.retention import is_whole, prune
from hybridflow.elastic.storage import settle, write_aside
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)

DRIVER_STATE = "driver.json"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified: every file is there as it was written."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Training steps that were complete."""
        return self.manifest.step

    def driver_state(self) -> dict:
        """The driver's state, exactly as it was given to `save`, and the `step`."""
        return json_state.loads((self.path / DRIVER_STATE).read_text())

    def check_parts(self, roles: Collection[str]) -> None:
        """Raises `CheckpointError` where the checkpoint lacks the part of a role that a run is to load."""
        missing = sorted(set(roles) - set(self.manifest.parts))
        if missing:
            raise CheckpointError(
                f"{self.path} has no part of the role '{missing[0]}'; it has: {', '.join(self.manifest.parts)}.",
                remedy="Train the roles that the run was started with, or start over with trainer.resume=never.",
            )


class CheckpointStore:
    """The checkpoints of one run.

        store = CheckpointStore(run_dir, keep=2)
        store.save(40, write=lambda directory: {"actor": all_files(actor.save(directory).result())}, driver_state={})
        checkpoint = store.latest()              # None, or verified to the last byte

    One process at a time writes to a run's directory.
    """

    def __init__(self, run_dir: Path, *, keep: int = 2, world: int = 1) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoints"
        self.keep = keep
        self.world = world

    def save(self, step: int, write: Callable[[Path], Parts], driver_state: dict) -> Path:
        """Write a checkpoint and return its path; then delete those beyond `keep`.

        `write` fills the directory it is given (workers save their own parts there) and answers what each role wrote.
        Until all of it is on the disk, and found there by this process, the checkpoint does not exist; if anything
        fails, the earlier ones are as they were.
        """
        state = json_state.dumps(driver_state | {"step": step})
        final = self.directory / f"step_{step}"
        with write_aside(final) as partial:
            fault_point("write_begun")
            parts = write(partial)
            fault_point("parts_written")
            (partial / DRIVER_STATE).write_text(state)
            fault_point("before_manifest")
            write_manifest(partial, parts, step=step, world=self.world)
        prune(self.paths(), keep=self.keep, just_written=final)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning that says why. Changes nothing."""
        for path in reversed(self.paths()):
            try:
                return self.open(path)
            except CheckpointError as error:
                logger.warning("checkpoint=%s is passed over: %s", path, error.message)
        return None

    def settle(self) -> None:
        """Finish what a killed save left behind; only for the process that claimed the run's directory."""
        settle(self.directory)

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint in a directory, verified to the last byte; `CheckpointError` names what is damaged."""
        if not (path / MANIFEST).exists():
            raise CheckpointError(_not_a_checkpoint(path), remedy=self._nearest(path))
        checkpoint = Checkpoint(path, verify(path))
        _check_step(checkpoint)
        return checkpoint

    def paths(self) -> list[Path]:
        """The `step_N` directories, oldest first, whole or not."""
        return steps_below(self.directory)

    def is_own(self, path: Path) -> bool:
        """Whether a checkpoint belongs to this run, also if `checkpoints` or a `step_N` in it is a symbolic link."""
        roots = {found.resolve() for found in (self.run_dir, self.directory, *self.paths())}
        places = (path.resolve(), path.parent.resolve() / path.name)
        return any(place.is_relative_to(root) for place in places for root in roots)

    def newest_whole(self) -> Path | None:
        """The newest checkpoint whose files have their sizes; their contents are not read."""
        return next((path for path in reversed(self.paths()) if is_whole(path)), None)

    def _nearest(self, path: Path) -> str:
        inside = steps_below(path) or steps_below(path / "checkpoints") or steps_below(path.parent) or self.paths()
        advice = "Give a step_N directory with a manifest.json as trainer.resume, or use trainer.resume=auto"
        return f"{advice}. Nearest: {inside[-1]}." if inside else f"{advice}."


def saved_config(path: Path) -> dict[str, object]:
    """The settings of a checkpoint, unverified; none where they cannot be read."""
    try:
        found = json_state.loads((path / DRIVER_STATE).read_text()).get("config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def steps_below(directory: Path) -> list[Path]:
    """The `step_N` directories below a directory, by step."""
    if not directory.is_dir():
        return []
    numbered = [(_STEP.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return [path for _, path in sorted((int(found[1]), path) for found, path in numbered if found)]


def _check_step(checkpoint: Checkpoint) -> None:
    """The directory's name and the driver's state say the same step as the manifest."""
    named, said = _STEP.fullmatch(checkpoint.path.name), checkpoint.driver_state().get("step")
    for what, step in (("its name", int(named[1]) if named else checkpoint.step), (DRIVER_STATE, said)):
        if step != checkpoint.step:
            raise CheckpointError(
                f"{checkpoint.path} is damaged: {what} says step {step}, its manifest step {checkpoint.step}.",
                remedy="Rename it to the name under which it was saved, or use another checkpoint of the run.",
            )


def _not_a_checkpoint(path: Path) -> str:
    if not path.exists():
        return f"The checkpoint {path} does not exist."
    return f"{path} is not a checkpoint: it has no {MANIFEST}."
