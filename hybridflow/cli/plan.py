"""`hybridflow plan`: predicts memory and time of a run on any devices, and finds its placement."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hybridflow.errors import ConfigError, Problems, ResourceError
from hybridflow.launch.command import ended_by_signals
from hybridflow.observability.printable import PlainConsole

_DESCRIPTION = """Predicts whether a run fits on given devices, how long a step takes and what bounds it, and finds the
placement, the parallel sizes and the memory settings with the shortest step. Settings that you give are kept. Starts
nothing, needs none of the devices, and reads neither data nor weights."""
_EXAMPLES = """examples:
  hybridflow plan                                        PPO of the built-in model on all devices of this machine
  hybridflow plan grpo model.path=Qwen3-32B --on 4x8xH100
  hybridflow plan ppo model.path=13B data.batch_size=1024 --on 16x8xA100-80 --figure plan.svg
  hybridflow plan ppo model.path=70B --on RTX-4090       what is missing, and which devices would do
  hybridflow plan --calibrate this.yaml                  measure this machine; then hybridflow plan --on 2xthis.yaml
  hybridflow plan run.yaml placement=split --on 2x8xH100 --save planned.yaml
  hybridflow plan run.yaml --on 4xH100,values=2xA100-80  given pools, of which `values` has other devices
  hybridflow plan runs/calculator                        the step that a run measured, next to the predicted one
"""

_CALIBRATED = Path("devices.yaml")

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
        metavar="COMMAND | FILE.yaml | key=value | RUN_DIR",
        help="a training command (default: ppo), run files and settings; model.path may be a known name or a size."
        " Or the directory of a run, to compare its steps with the prediction",
    )
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help="8xH100, 16x8xA100-80, cpu, my.yaml:NAME (default: all devices of this machine or of the Ray cluster;"
        " trainer.devices if you set it)",
    )
    parser.add_argument(
        "--mean-response", type=float, metavar="TOKENS", help="mean length of responses (default: half of the maximum)"
    )
    parser.add_argument(
        "--calibrate",
        nargs="?",
        type=Path,
        const=_CALIBRATED,
        metavar="FILE.yaml",
        help=f"measure the devices of this machine, in about a minute, for --on and trainer.device_file (default:"
        f" {_CALIBRATED})",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="write a drawing of the step and its memory")
    parser.add_argument("--save", type=Path, metavar="FILE.yaml", help="write a run file with the plan's settings")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.calibrate is not None:
        return _calibrate(arguments, console)
    if arguments.overrides and _is_directory(arguments.overrides[0]):
        return _compare(arguments)
    return _plan(arguments, console)


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    """The plan of a run, with what the options ask for."""
    with ended_by_signals():
        from hybridflow.launch.compose.compose import compose_run
        from hybridflow.launch.compose.run_files import read_run_files, with_files
        from hybridflow.launch.compose.trainers import TrainingCommand, is_run_file, known_command

    if arguments.figure is not None and arguments.figure.suffix != ".svg":
        raise ConfigError(f"--figure {arguments.figure} is not an SVG file.", remedy="Give a name that ends with .svg.")
    words = list(arguments.overrides)
    files = [Path(word) for word in words if is_run_file(word)]
    command = TrainingCommand("ppo")
    if words and "=" not in words[0] and not is_run_file(words[0]):
        command = known_command(words.pop(0))
    elif (found := read_run_files(files, Problems(collects=True)).command) is not None:
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

    with _advising_to_name_devices(arguments.on):
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
            stands_in = file is arguments.save and _NO_DATA in typed
            note = " (data.jsonl in it stands for your data: set data.train_files)" if stands_in else ""
            console.print(f"{file}{note}", soft_wrap=True, markup=False, highlight=False)
    return 0 if answer.plans else 2


@contextmanager
def _advising_to_name_devices(devices: str | None) -> Iterator[None]:
    """Devices that are not here need not be, if they are named."""
    try:
        yield
    except ResourceError as error:
        if devices is None:
            error.remedy = f"{error.remedy} To plan for devices that are not here, name them, as in --on 2x8xH100."
        raise


def _is_directory(word: str) -> bool:
    """Whether a word is the path of a directory and not a command, a run file or a setting."""
    from hybridflow.launch.compose.trainers import find_command, is_run_file

    if "=" in word or is_run_file(word) or find_command(word) is not None:
        return False
    return "/" in word or Path(word).is_dir()


def _compare(arguments: argparse.Namespace) -> int:
    """The steps of a run next to their prediction."""
    others = {"--figure": arguments.figure, "--save": arguments.save, "--mean-response": arguments.mean_response}
    given = [*arguments.overrides[1:], *(option for option, value in others.items() if value is not None)]
    if given:
        raise ConfigError(
            f"'{arguments.overrides[0]}' is the directory of a run, whose settings and lengths are known: {given[0]}"
            " does not apply.",
            remedy=f"Leave it out. To plan the settings of the run again, use {arguments.overrides[0]}/config.yaml.",
        )
    with ended_by_signals():
        from dataclasses import asdict

        from hybridflow.launch.recorded_run import compared_run
        from hybridflow.mapping.comparison import comparison_text

    compared = compared_run(Path(arguments.overrides[0]), arguments.on)
    text = f"{json.dumps(asdict(compared), indent=2)}\n" if arguments.json else comparison_text(compared)
    PlainConsole(highlight=False).print(text, markup=False, soft_wrap=True, end="")
    return 0


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    """Measures this machine, writes the file, and prints what was measured."""
    file = arguments.calibrate
    others = ("on", "mean_response", "json", "figure", "save")
    given = [*arguments.overrides, *(f"--{name.replace('_', '-')}" for name in others if vars(arguments)[name])]
    if given:
        raise ConfigError(
            f"--calibrate measures this machine, to which {given[0]} does not apply.",
            remedy=f"Calibrate first (hybridflow plan --calibrate {file}), and then plan with --on {file}.",
        )
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"--calibrate {file} is not a YAML file.",
            remedy="Give a name that ends with .yaml, or none for devices.yaml.",
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"--calibrate {file}: there is no directory {file.absolute().parent}.", remedy="Give an existing directory."
        )
    with ended_by_signals():
        from hybridflow.launch.calibration import calibrate_devices

        calibrate_devices(file, lambda line: console.print(line, soft_wrap=True, markup=False, highlight=False))
    return 0


def _write(file: Path, option: str, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}={file} could not be written: {error.strerror}.", remedy="Give a file in an existing directory."
        ) from error
