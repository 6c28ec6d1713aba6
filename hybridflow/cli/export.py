"""`hybridflow export RUN_DIR OUT`: a trained model as a Hugging Face directory."""

import argparse
from pathlib import Path
from typing import Protocol

from rich.console import Console

from hybridflow.config.model import Dtype
from hybridflow.launch.command import ended_by_signals

_EXAMPLES = """examples:
  hybridflow export runs/calculator model                     the actor of the newest complete checkpoint
  hybridflow export runs/calculator model --step 40
  hybridflow export runs/calculator critic --role critic      transformers.AutoModelForTokenClassification reads it
  hybridflow export runs/reward scorer                        of main_reward_model: reward.model.path=scorer
  hybridflow export runs/large model --dtype bfloat16
"""


class Commands(Protocol):
    """The object to which argparse adds commands."""

    def add_parser(
        self, name: str, *, help: str, description: str, epilog: str, formatter_class: type[argparse.HelpFormatter]
    ) -> argparse.ArgumentParser:
        """A parser for one more command."""
        ...


def add_command(commands: Commands) -> None:
    """Adds `export` to the commands."""
    parser = commands.add_parser(
        "export",
        help="write a trained model as a Hugging Face directory",
        description="Writes the model of a run's checkpoint, once every file of it is verified, as a Hugging Face"
        " directory with its tokenizer. A low-rank adapter is added to the model's weights.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write, new or empty")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete)"
    )
    parser.add_argument("--role", help="the role whose model to write (default: actor, or the only one)")
    parser.add_argument("--dtype", choices=[dtype.name for dtype in Dtype], help="number format (default: as trained)")
    parser.add_argument("--base-model", metavar="PATH", help="the base model of an adapter, if it has moved")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, console: Console) -> None:
    with ended_by_signals("interrupted"):
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
