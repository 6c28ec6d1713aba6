"""`hybridflow export RUN_DIR OUT`: a trained model as a Hugging Face directory."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.config.model import Dtype
from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Writes the model of a run's checkpoint, after verifying every file of it, as a Hugging Face directory
with its tokenizer. Low-rank adapters are merged into the model's weights."""
_EXAMPLES = """examples:
  hybridflow export runs/calculator model                     the actor of the newest complete checkpoint
  hybridflow export runs/calculator model --step 40
  hybridflow export runs/calculator critic --role critic      transformers.AutoModelForTokenClassification reads it
  hybridflow export runs/reward scorer                        of reward-model: reward.model.path=scorer
  hybridflow export runs/large model --dtype bfloat16
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `export` to the commands."""
    summary = "write a trained model as a Hugging Face directory"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write, new or empty")
    step = "the checkpoint of this step (default: the newest complete)"
    parser.add_argument("--step", type=int, metavar="N", help=step)
    parser.add_argument("--role", help="the role whose model to write (default: actor, or the only one)")
    parser.add_argument("--dtype", choices=[dtype.name for dtype in Dtype], help="number format (default: as trained)")
    parser.add_argument("--base-model", metavar="PATH", help="the base model of an adapter, if it has moved")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    with ended_by_signals():
        from hybridflow.elastic.export import export_model

    source = export_model(
        arguments.run_dir,
        arguments.out,
        step=arguments.step,
        role=arguments.role,
        dtype=None if arguments.dtype is None else Dtype[arguments.dtype],
        base_model=arguments.base_model,
    )
    console.print(f"{arguments.out}  {source.name} of {source.parent}", soft_wrap=True)
