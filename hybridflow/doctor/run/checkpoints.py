"""The checkpoints: which are complete, and from which one the run resumes."""

import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from hybridflow.doctor.finding import Finding, ok, problem, skipped, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.elastic.checkpoint import step_name, step_of
from hybridflow.elastic.manifest import verify
from hybridflow.elastic.resuming import CONFIG_FILE
from hybridflow.errors import CheckpointError
from hybridflow.observability.formatting import counted
from hybridflow.parallel.file_records import files_below

_SLOW_BYTES = 20 << 30
"""Size above which the contents of older checkpoints are not read: minutes from most disks."""


def checkpoints(run: RunDirectory) -> Iterator[Finding]:
    """The complete ones, the damaged ones, and saves that were cut off."""
    paths, whole = run.store.paths(), _whole(run)
    how = "sizes only" if run.is_quick else "checksums"
    if whole:
        size = bytes_of(whole[-1])
        names = ", ".join(path.name for path in whole)
        yield ok("checkpoints", f"{names}: complete ({how}), {size / 1e6:,.0f} MB the last one")
    yield from _damaged(run)
    for step in () if run.is_alive else run.unfinished_saves:
        rest = "the next save deletes the rest (on another machine, after a day)"
        found = f"{step_name(step)} was being saved when the run ended; {rest}"
        yield skipped("checkpoints", found)
    if not paths:
        every = run.setting("trainer.save_every")
        why = f" (trainer.save_every={every})" if every is not None else ""
        lower = "Set a lower trainer.save_every, so that less is lost." if every else "Set trainer.save_every."
        saved = [line.message for line in run.lines if line.message.startswith("saved checkpoint=")]
        if saved:
            last = saved[-1].removeprefix("saved checkpoint=").rpartition(" seconds=")[0]
            yield warning("checkpoints", f"none is left: the run saved {last}, which was deleted or moved")
        elif run.is_alive or not run.rows:
            yield ok("checkpoints", f"none yet{why}")
        else:
            yield warning("checkpoints", f"none was saved{why}", lower)


def _damaged(run: RunDirectory) -> Iterator[Finding]:
    """Those that cannot be used; a problem if no other is left."""
    url = run.setting("trainer.checkpoint_url")
    for path, why in _damage(run).items():
        found = f"{path.name} is not usable: {why.removeprefix(f'{path}').lstrip('/ ').rstrip('.')}"
        if _whole(run):
            delete = f"Delete {path.name}, which a run passes over: rm -r {shlex.quote(str(path))}"
            yield warning("checkpoints", found, delete)
        elif url:
            yield problem(
                "checkpoints", found, f"Rename {path.name}, and start the run again: {url} may have a whole one."
            )
        else:
            yield problem("checkpoints", found, f"Restore {path.name} from a copy: no other checkpoint is left.")


def resuming(run: RunDirectory) -> Iterator[Finding]:
    """The checkpoint from which the run would resume, and the command that does it."""
    if run.is_alive:
        return
    total, whole = run.setting("trainer.total_steps"), _whole(run)
    if run.ending is not None and run.ending.how == "done" and (not whole or step_of(whole[-1]) == total):
        yield ok("resume", f"nothing is left to do; to train further, raise trainer.total_steps={total}")
        return
    again = resume_command(run)
    if not whole:
        url = run.setting("trainer.checkpoint_url")
        unless = f", unless {url} has one (not examined)" if url else ""
        found = f"from the beginning, as there is no usable checkpoint here{unless}"
        yield ok("resume", found, f"Start it again: {again}")
        return
    if run.ending is not None and run.ending.how == "failed":
        again += " (after changing code or data, with trainer.resume_changed=accept)"
    step = step_of(whole[-1])
    lost = run.last_step - step
    repeated = f"; {counted(lost, 'step')} after it {'is' if lost == 1 else 'are'} trained again" if lost > 0 else ""
    yield ok("resume", f"from step {step} of {total or '?'} ({whole[-1]}){repeated}", f"Resume it: {again}")


def resume_command(run: RunDirectory) -> str:
    """The command that continues the run."""
    file, resume = run.path / CONFIG_FILE, run.setting("trainer.resume")
    auto = "" if resume in ("auto", None) else " trainer.resume=auto"
    if run.setting("trainer") is not None:
        return f"hybridflow run {shlex.quote(str(file))}{auto}"
    if run.start is not None and run.start.command:
        return f"cd {shlex.quote(run.start.directory)} && {run.start.command}{auto}"
    return f"the command that started it, with trainer.run_dir={shlex.quote(str(run.path))}"


@lru_cache
def _damage(run: RunDirectory) -> dict[Path, str]:
    """The checkpoints that cannot be used, each with the reason."""
    found, read = {}, 0
    for path in reversed(run.store.paths()):
        run.doing(f"verifying {path}")
        try:
            if run.is_quick or read > _SLOW_BYTES:
                verify(path, full=False)
            else:
                run.store.open(path)
                read += bytes_of(path)
        except (CheckpointError, OSError, ValueError) as error:
            found[path] = error.message if isinstance(error, CheckpointError) else str(error)
    return dict(reversed(found.items()))


def bytes_of(path: Path) -> int:
    """The size of a checkpoint."""
    return sum(files_below(path).values())


def _whole(run: RunDirectory) -> list[Path]:
    """The checkpoints that can be used, the oldest first."""
    return [path for path in run.store.paths() if path not in _damage(run)]
