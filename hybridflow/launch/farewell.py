"""The last lines of a run: what came of it, and where everything is."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hybridflow.dataflows.loop import Outcome
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.launch.execute import Finished
from hybridflow.launch.failure import from_here
from hybridflow.launch.going_on import nothing_saved, resumed_from
from hybridflow.observability import formatting
from hybridflow.observability.progress import eval_label


def say_finished(finished: Finished, console: Console) -> None:
    """How it ended, how the evaluation went from first to last, the report, and the checkpoint."""
    outcome, ending = finished.outcome, finished.ending
    colour = "bold green" if ending.how == "done" else "bold yellow"
    console.print(Text.assemble((ending.how, colour), f"  {ending.said}"), soft_wrap=True)
    _say_evaluations(outcome, finished.first_evaluation, console)
    if finished.report is not None:
        console.print(f"  report      {from_here(finished.report)}", soft_wrap=True)
    if outcome.checkpoint is not None:
        checkpoint = from_here(outcome.checkpoint)
        console.print(f"  checkpoint  {checkpoint}", soft_wrap=True)
        _say_model(checkpoint, console)


def _say_evaluations(outcome: Outcome, first_evaluation: Mapping[str, float], console: Console) -> None:
    """`acc  0.594 at step 25, from 0.438`; without the step where the last step was evaluated."""
    first, last = outcome.evaluated
    is_only = first == last
    at = f" at step {last}" if is_only or last != outcome.steps else ""
    for name, value in outcome.evaluation.items():
        line = Text.assemble(f"  {eval_label(name)}  ", (formatting.short(value), "bold"), (at, "dim"))
        if name in first_evaluation and not is_only:
            line.append(f"{', ' if at else '  '}from {formatting.short(first_evaluation[name])}", "dim")
        console.print(line)


def say_stopped_at_once(run_dir: Path, resume: str, console: Console) -> None:
    """What is left of a run that was stopped before its first step, or by a second signal."""
    saved = CheckpointStore(run_dir).newest_whole()
    said = nothing_saved(resume)
    if saved is not None:
        said = resumed_from(f"the last checkpoint, step {saved.name.removeprefix('step_')}", resume)
    console.print(Text.assemble(("\ninterrupted", "bold yellow"), f"  {said}"), soft_wrap=True)
    if (report := run_dir / "report.html").is_file():
        console.print(f"  report      {from_here(report)}", soft_wrap=True)
    if saved is not None:
        console.print(f"  checkpoint  {from_here(saved)}", soft_wrap=True)


def say_kept(run_dir: Path, resume: str, console: Console) -> None:
    """The last whole checkpoint of a run that failed, and how to go on from it."""
    if saved := CheckpointStore(run_dir).newest_whole():
        how = f"{resumed_from('it', resume)}; if you change code or data, add trainer.resume_changed=accept"
        console.print(f"  checkpoint  {from_here(saved)}  ({how})", soft_wrap=True)


def say_restored(run_dir: Path, console: Console) -> None:
    """What a run that failed or was interrupted before its first step leaves: the earlier run of its directory."""
    console.print(f"  run_dir     {from_here(run_dir)}  (the earlier run in it is as it was)", soft_wrap=True)


def _say_model(checkpoint: Path, console: Console) -> None:
    """Where the trained model is, and what reads it."""
    judge = checkpoint / "reward_model"
    if judge.is_dir():
        kind = "adapter" if (judge / "adapter").is_dir() else "huggingface"
        console.print(f"  model       {judge / kind}", soft_wrap=True)
        if kind == "huggingface":
            console.print(f"  serve it    main_ppo reward.model.path={judge / kind}", soft_wrap=True)
        else:
            run_dir = checkpoint.parent.parent
            console.print(f"  serve it    hybridflow export {run_dir} DIRECTORY --role reward_model, then"
                          " main_ppo reward.model.path=DIRECTORY", soft_wrap=True)  # fmt: skip
        return
    actor = checkpoint / "actor"
    if (actor / "adapter").is_dir():
        console.print(f"  adapter     {actor / 'adapter'}  (peft, or hybridflow export)", soft_wrap=True)
    else:
        model = actor / "huggingface"
        console.print(f"  model       {model}  (AutoModelForCausalLM.from_pretrained)", soft_wrap=True)
