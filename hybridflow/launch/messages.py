"""The terminal output of a run: problems, failures, and its last lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.errors import Advice, HybridflowError, WorkerError, explained
from hybridflow.observability import formatting
from hybridflow.observability.ending import Ending
from hybridflow.observability.progress import eval_label
from hybridflow.observability.redaction import redacted_text

if TYPE_CHECKING:  # the first error can be printed before torch is imported
    from hybridflow.dataflows.run import Outcome

LEFT_TO_CHECK = "Models and data are checked once these problems are fixed."
"""Printed by `--dry-run` instead of the roles if it cannot plan them."""

_USE_REWARD = "hybridflow ppo reward.model.path"


@dataclass(frozen=True)
class Finished:
    """A run that finished or was asked to stop: its outcome, its directory, and its report, if any."""

    outcome: "Outcome"
    ending: Ending
    run_dir: Path
    report: Path | None
    first_evaluation: dict[str, float]


def say_failure(console: Console, error: HybridflowError, *, report: Path | None = None) -> None:
    """The error and its remedy; for a failure in a worker also the worker, and the traceback if it is unexplained."""
    shown = explained(error)
    console.print(Text.assemble((f"{type(shown).__name__}: ", "bold red"), redacted_text(shown.message)))
    _say_remedy(console, shown.remedy)
    if isinstance(error, WorkerError):
        console.print(Text(error.place, "bold"))
        if shown is error:
            console.print(Text(redacted_text(error.worker_traceback.rstrip()), "dim"))
    if report is not None and report.is_file():
        console.print(f"  report      {from_here(report)}", soft_wrap=True)


def say_problems(console: Console, found: Sequence[HybridflowError], *, begin: int = 0) -> None:
    """The problems from position `begin`, numbered."""
    for number, error in enumerate(found[begin:], begin + 1):
        console.print(f"{number}. ", end="")
        say_failure(console, error)


def say_warnings(console: Console, warnings: Sequence[Advice]) -> None:
    """Warnings, which do not keep a run from starting."""
    for advice in warnings:
        console.print(Text.assemble(("Warning: ", "bold yellow"), redacted_text(advice.message)))
        _say_remedy(console, advice.remedy)


def say_finished(finished: Finished, console: Console) -> None:
    """How it ended, the first and last evaluation, whether nothing was learned, the report, and the checkpoint."""
    outcome, ending = finished.outcome, finished.ending
    color = "bold green" if ending.how == "done" else "bold yellow"
    console.print(Text.assemble((ending.how, color), f"  {ending.said}"), soft_wrap=True)
    _say_evaluations(outcome, finished.first_evaluation, console)
    say_warnings(console, outcome.warnings)
    if finished.report is not None:
        console.print(f"  report      {from_here(finished.report)}", soft_wrap=True)
    if outcome.checkpoint is not None:
        checkpoint = from_here(outcome.checkpoint)
        console.print(f"  checkpoint  {checkpoint}", soft_wrap=True)
        _say_model(checkpoint, console)


def say_stopped_at_once(run_dir: Path, resume: str, console: Console) -> None:
    """The report and checkpoint of a run that was stopped before its first step, or by a second signal."""
    saved = CheckpointStore(run_dir).newest_whole()
    next_start = nothing_saved(resume)
    if saved is not None:
        next_start = resumed_from(f"the last checkpoint, step {saved.name.removeprefix('step_')}", resume)
    console.print(Text.assemble(("\ninterrupted", "bold yellow"), f"  {next_start}"), soft_wrap=True)
    if (report := run_dir / "report.html").is_file():
        console.print(f"  report      {from_here(report)}", soft_wrap=True)
    if saved is not None:
        console.print(f"  checkpoint  {from_here(saved)}", soft_wrap=True)


def say_kept(run_dir: Path, resume: str, console: Console) -> None:
    """The last whole checkpoint of a run that failed, and how to resume from it."""
    if saved := CheckpointStore(run_dir).newest_whole():
        how = f"{resumed_from('it', resume)}; if you change code or data, add trainer.resume_changed=accept"
        console.print(f"  checkpoint  {from_here(saved)}  ({how})", soft_wrap=True)


def say_restored(run_dir: Path, console: Console) -> None:
    """The run directory after a failure or an interruption before the first step, which restores the earlier run."""
    console.print(f"  run_dir     {from_here(run_dir)}  (the earlier run in it is unchanged)", soft_wrap=True)


def ending_of(outcome: "Outcome", run_dir: Path, resume: str, *, work: str = "") -> Ending:
    """How a run ended that raised no error, beginning with the saved step; `work`: what it did without training."""
    stopped, steps = outcome.stopped, formatting.counted(outcome.steps, "step")
    if stopped is None:
        return Ending("done", work or steps)
    if work:
        return Ending("interrupted", f"before the end of the {work} ({stopped.by})")
    saved, path = stopped.saved_step, outcome.checkpoint
    if path is None or not CheckpointStore(run_dir).is_own(path):  # none, or the one that the run resumed from
        next_start = nothing_saved(resume)
    elif saved == outcome.steps:
        next_start = f"saved step {saved}: {resumed_from('it', resume)}."
    else:
        last = f"the last checkpoint, step {saved}"
        next_start = f"step {outcome.steps} is not saved: {resumed_from(last, resume)}."
    abandoned = stopped.abandoned[:1].upper() + stopped.abandoned[1:]
    if stopped.loses_steps:
        next_start += (
            f" {abandoned} was abandoned in its update, or in code that did not stop in time, so the steps"
            " before it cannot be saved: raise trainer.stop_seconds, or lower trainer.save_every."
        )
    elif stopped.abandoned:
        next_start += f" {abandoned} was abandoned."
    return Ending("interrupted", next_start)


def resumed_from(checkpoint: str, resume: str) -> str:
    """How a run resumes from its own checkpoint: by the same command, or with another `trainer.resume`."""
    if resume == "auto":
        return f"the same command resumes from {checkpoint}"
    return f"to resume from {checkpoint}, set trainer.resume=auto"


def nothing_saved(resume: str) -> str:
    """The effect of the same command if the run has no checkpoint of its own."""
    start = "the beginning" if resume in ("auto", "never") else f"trainer.resume={resume} again"
    return f"No checkpoint was saved. The same command starts from {start}."


def from_here(path: Path) -> Path:
    """The shortest form of the path: relative to the current directory if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _say_remedy(console: Console, remedy: str) -> None:
    console.print(Text.assemble(("What to do: ", "bold"), redacted_text(remedy)))


def _say_evaluations(outcome: "Outcome", first_evaluation: Mapping[str, float], console: Console) -> None:
    """`acc  0.594 at step 25, from 0.438`; without the step if the last step was evaluated."""
    first, last = outcome.evaluated
    is_only = first == last
    at = f" at step {last}" if outcome.steps and (is_only or last != outcome.steps) else ""
    for name, value in outcome.evaluation.items():
        line = Text.assemble(f"  {eval_label(name)}  ", (formatting.short(value), "bold"), (at, "dim"))
        if name in first_evaluation and not is_only:
            line.append(f"{', ' if at else '  '}from {formatting.short(first_evaluation[name])}", "dim")
        console.print(line)


def _say_model(checkpoint: Path, console: Console) -> None:
    """The path of the trained model, and what reads it."""
    role = "reward_model" if (checkpoint / "reward_model").is_dir() else "actor"
    adapter, model = checkpoint / role / "adapter", checkpoint / role / "huggingface"
    if role == "actor" and adapter.is_dir():
        lines = [f"adapter     {adapter}  (peft, or hybridflow export)"]
    elif role == "actor":
        lines = [f"model       {model}  (AutoModelForCausalLM.from_pretrained)"]
    elif adapter.is_dir():
        export = f"hybridflow export {checkpoint.parent.parent} DIRECTORY --role reward_model"
        lines = [f"model       {adapter}", f"use it      {export}, then {_USE_REWARD}=DIRECTORY"]
    else:
        lines = [f"model       {model}", f"use it      {_USE_REWARD}={model}"]
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)
