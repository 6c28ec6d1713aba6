"""`hybridflow show`: draws one step of a dataflow, or lists the algorithms."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.command import ended_by_signals
from hybridflow.observability.printable import PlainConsole

_DESCRIPTION = """Traces one step of a dataflow under a given configuration and draws it: the roles and their pools, the
calls in order, the columns that each call reads and adds, and what runs concurrently. Nothing is started,
and neither data nor models are read."""
_EXAMPLES = """examples:
  hybridflow show                                  PPO, as hybridflow ppo runs it without arguments
  hybridflow show run.yaml                         a run file, or the config.yaml of a run
  hybridflow show --dataflow safe_rlhf
  hybridflow show --dataflow my_flow.py:Mine --svg mine.svg
  hybridflow show --dataflow grpo algorithm.kl.placement=loss trainer.devices=2
  hybridflow show algorithm=grpo placement.pools.train.devices=4 placement.pools.judge.devices=2 \\
      placement.roles.reward=judge trainer.devices=6
  hybridflow show --algorithms                     what algorithm=... chooses, and what each needs
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `show` to the commands."""
    summary = "draw one step of a dataflow: its calls, columns, and what runs concurrently"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings or run files, as hybridflow ppo takes them"
    )
    parser.add_argument("--dataflow", metavar="NAME", help="ppo, grpo, ..., file.py:Class, or any algorithm=NAME")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing as an SVG page")
    parser.add_argument("--algorithms", action="store_true", help="the table of algorithms instead of a drawing")
    parser.add_argument("--config-name", metavar="NAME", help="the configuration to use (default: the dataflow's)")
    parser.add_argument("--config-dir", type=Path, metavar="DIRECTORY", help="directory in which to look for it")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.algorithms:
        with ended_by_signals():
            from hybridflow.launch.algorithm_table import algorithm_table, text_tables

        PlainConsole(highlight=False).print(text_tables(algorithm_table()))
        return
    with ended_by_signals():
        from hybridflow.launch.compose.compose import compose_run
        from hybridflow.launch.compose.run_files import read_run_files, with_files
        from hybridflow.launch.compose.trainers import TrainingCommand, command_of_dataflow, is_run_file

    files = [Path(word) for word in arguments.overrides if is_run_file(word)]
    command = TrainingCommand("ppo")
    if arguments.dataflow is not None:
        command = command_of_dataflow(arguments.dataflow)
    elif (found := read_run_files(files, Problems(collects=True)).command) is not None:
        command = TrainingCommand(found.trainer)
    name = arguments.config_name or command.trainer
    typed = [*command.overrides, *(word for word in arguments.overrides if not is_run_file(word))]
    composed = compose_run(
        with_files(files, typed, config_name=name), config_name=name, config_dir=arguments.config_dir
    )
    with ended_by_signals():  # only now, so that a wrong setting is reported before torch is loaded
        from hybridflow.graph.svg import svg_drawing
        from hybridflow.graph.text import text_drawing
        from hybridflow.launch.step_trace import plan_to_show, trace_step

    trace = trace_step(plan_to_show(composed))
    PlainConsole(highlight=False).print(text_drawing(trace))
    if arguments.svg is not None:
        _write(arguments.svg, svg_drawing(trace))
        console.print(f"{arguments.svg}", soft_wrap=True)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--svg={file} could not be written: {error.strerror}.", remedy="Give a file in an existing directory."
        ) from error
