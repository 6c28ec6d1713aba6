"""The last lines of a run: what came of it, and where everything is."""

from rich.console import Console
from rich.text import Text

from hybridflow.launch.execute import Finished
from hybridflow.observability.progress import eval_label


def say_finished(finished: Finished, console: Console) -> None:
    """How the evaluation went from first to last, the report, and the checkpoint."""
    outcome = finished.outcome
    console.print(Text.assemble(("done", "bold green"), f"  {outcome.steps} steps"))
    for name, value in outcome.evaluation.items():
        line = Text.assemble(f"  {eval_label(name)}  ", (f"{value:.3f}", "bold"))
        if name in finished.first_evaluation:
            line.append(f"  from {finished.first_evaluation[name]:.3f}", "dim")
        console.print(line)
    if finished.report is not None:
        console.print(f"  report      {finished.report}", soft_wrap=True)
    if outcome.checkpoint is not None:
        console.print(f"  checkpoint  {outcome.checkpoint}", soft_wrap=True)
        actor = outcome.checkpoint / "actor"
        if (actor / "adapter").is_dir():
            console.print(f"  adapter     {actor / 'adapter'}  (peft, or hybridflow export)", soft_wrap=True)
        else:
            model = actor / "huggingface"
            console.print(f"  model       {model}  (AutoModelForCausalLM.from_pretrained)", soft_wrap=True)
