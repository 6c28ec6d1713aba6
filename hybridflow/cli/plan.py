"""`hybridflow plan`: predicts memory and time of a run on any devices, and finds its placement."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.errors import ConfigError, Faults
from hybridflow.launch.command import ended_by_signals
from hybridflow.observability.printable import PlainConsole

_DESCRIPTION = """Predicts whether a run fits on given devices, how long a step takes and what bounds it, and finds the
placement, the parallel sizes and the memory settings with the shortest step. Settings that you give are kept. Starts
nothing, needs none of the devices, and reads neither data nor weights."""
_EXAMPLES = """examples:
  hybridflow plan                                        PPO of the built-in model on the devices of this machine
  hybridflow plan grpo model.path=Qwen3-32B --on 4x8xH100
  hybridflow plan ppo model.path=13B data.batch_size=1024 --on 16x8xA100-80 --figure plan.svg
  hybridflow plan ppo model.path=70B --on RTX-4090       what is missing, and which devices would do
  hybridflow plan run.yaml placement=split --on 2x8xH100 --save planned.yaml
"""

_NO_DATA = "data.train_files=[data.jsonl]"
"""Stands for data that the user has not named."""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `plan` to the commands."""
    summary = "predict memory and time of a run on any devices, and find its placement"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="COMMAND | FILE.yaml | key=value",
        help="a training command (default: ppo), run files and settings; model.path may be a known name or a size",
    )
    parser.add_argument("--on", metavar="DEVICES", help="8xH100, 16x8xA100-80, cpu, my.yaml:NAME (default: those here)")
    parser.add_argument(
        "--mean-response", type=float, metavar="TOKENS", help="mean length of responses (default: half of the maximum)"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="write a drawing of the step and its memory")
    parser.add_argument("--save", type=Path, metavar="FILE.yaml", help="write a run file with the plan's settings")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with ended_by_signals():
        from hybridflow.launch.compose.compose import compose_run
        from hybridflow.launch.compose.run_files import read_run_files, with_files
        from hybridflow.launch.compose.trainers import TrainingCommand, is_run_file, known_command

    words = list(arguments.overrides)
    files = [Path(word) for word in words if is_run_file(word)]
    command = TrainingCommand("ppo")
    if words and "=" not in words[0] and not is_run_file(words[0]):
        command = known_command(words.pop(0))
    elif (found := read_run_files(files, Faults(collects=True)).command) is not None:
        command = TrainingCommand(found.trainer)
    typed = [*command.overrides, *(word for word in words if not is_run_file(word))]
    has_own_model = any(word.startswith("model.path=") and ":" not in word for word in typed)
    if has_own_model and not files and not any(word.startswith(("data=", "data.train_files=")) for word in typed):
        typed.insert(0, _NO_DATA)  # a model of one's own needs data to run, and none to be planned
    composed = compose_run(with_files(files, typed, config_name=command.trainer), config_name=command.trainer)
    with ended_by_signals():  # only now, so that a wrong setting is reported before torch is loaded
        from hybridflow.launch.planning import plan_on, run_file
        from hybridflow.mapping.explanation import as_json
        from hybridflow.mapping.explanation_text import text_of
        from hybridflow.mapping.figure import svg_of

    plan, answer = plan_on(composed, arguments.on, mean_response=arguments.mean_response)
    if arguments.json:
        PlainConsole(highlight=False).print(json.dumps(as_json(answer), indent=2), markup=False, soft_wrap=True)
    else:
        PlainConsole(highlight=False).print(text_of(answer), markup=False, soft_wrap=True, end="")
    for file, option, content in (
        (arguments.figure, "--figure", lambda: svg_of(answer.plans[0])),
        (arguments.save, "--save", lambda: run_file(plan, answer.plans[0])),
    ):
        if file is not None and answer.plans:
            _write(file, option, content())
            console.print(f"{file}", soft_wrap=True)
    return 0 if answer.plans else 2


def _write(file: Path, option: str, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}={file} could not be written: {error.strerror}.", remedy="Give a file in an existing directory."
        ) from error
