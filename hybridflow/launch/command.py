"""What every `python -m hybridflow.trainer.main_*` does: parse, run, say how it went."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hybridflow.errors import ConfigError, DataError, HybridflowError, MissingExtraError
from hybridflow.launch.compose import Composed, compose_run, parse_command_line
from hybridflow.launch.help import config_text, help_text

USAGE_ERRORS = (ConfigError, DataError, MissingExtraError)


def run_command(argv: Sequence[str] | None, *, program: str, config_name: str, purpose: str) -> int:
    """The exit status: 0 done, 1 the run failed, 2 it could not begin, 130 interrupted."""
    console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    try:
        flags = parse_command_line(sys.argv[1:] if argv is None else argv, program=program, config_name=config_name)
        if flags.help:
            sys.stdout.write(help_text(program=program, config_name=flags.config_name, purpose=purpose))
            return 0
        composed = compose_run(flags.overrides, config_name=flags.config_name, config_dir=flags.config_dir)
        if flags.cfg:
            sys.stdout.write(config_text(composed))
            return 0
        _run(composed, console)
        return 0
    except HybridflowError as error:
        _say(console, error)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        console.print("\n[yellow]interrupted[/]  The same command goes on from the last checkpoint.")
        return 130


def _run(composed: Composed, console: Console) -> None:
    # Imported here, so that a wrong setting is reported before torch is loaded.
    from hybridflow.launch.execute import execute
    from hybridflow.launch.farewell import say_finished

    say_finished(execute(composed, console), console)


def _say(console: Console, error: HybridflowError) -> None:
    name = type(error).__name__
    text = Text.assemble((f"{name}: ", "bold red"), error.message)
    console.print(text)
    console.print(Text.assemble(("What to do: ", "bold"), error.remedy))
    trace = vars(error).get("worker_traceback")
    if trace:
        place = {key: vars(error)[key] for key in ("role", "rank", "node", "method")}
        console.print(Text(" ".join(f"{key}={value}" for key, value in place.items()), "bold"))
        console.print(Text(str(trace).rstrip(), "dim"))
