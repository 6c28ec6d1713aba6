"""How a run that was stopped goes on, in words: what the same command does depends on `trainer.resume`."""

from pathlib import Path

from hybridflow.dataflows.loop import Outcome
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.observability.ending import Ending


def ending_of(outcome: Outcome, run_dir: Path, resume: str) -> Ending:
    """How a run ended that raised nothing, in a sentence that begins with what is saved."""
    stopped, steps = outcome.stopped, f"{outcome.steps} step{'' if outcome.steps == 1 else 's'}"
    if stopped is None:
        return Ending("done", steps)
    saved, path = stopped.saved_step, outcome.checkpoint
    if path is None or not CheckpointStore(run_dir).is_own(path):  # none, or the one that it began from
        said = nothing_saved(resume)
    elif saved == outcome.steps:
        said = f"saved step {saved}: {resumed_from('it', resume)}."
    else:
        said = f"step {outcome.steps} is not saved: {resumed_from(f'the last checkpoint, step {saved}', resume)}."
    return Ending("interrupted", said + (f" {stopped.abandoned} was abandoned." if stopped.abandoned else ""))


def resumed_from(checkpoint: str, resume: str) -> str:
    """How a run goes on from its own checkpoint: by the same command, or with another `trainer.resume`."""
    if resume == "auto":
        return f"the same command resumes from {checkpoint}"
    return f"to resume from {checkpoint}, set trainer.resume=auto"


def nothing_saved(resume: str) -> str:
    """What the same command does where the run has no checkpoint of its own."""
    start = "the beginning" if resume in ("auto", "never") else f"trainer.resume={resume} again"
    return f"No checkpoint was saved. The same command starts from {start}."
