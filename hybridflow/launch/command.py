"""What every `python -m hybridflow.trainer.main_*` does: parse, run, say how it went."""

import sys
from collections.abc import Sequence

from rich.console import Console

from hybridflow.errors import HybridflowError
from hybridflow.launch.compose import compose_run, parse_command_line
from hybridflow.launch.failure import say_failure
from hybridflow.launch.help import config_text, help_text


def run_command(argv: Sequence[str] | None, *, program: str, config_name: str, purpose: str) -> int:
    """The exit status: 0 done, 1 the run failed, 2 it could not begin, 130 interrupted."""
    console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    status = 2
    try:
        flags = parse_command_line(sys.argv[1:] if argv is None else argv, program=program, config_name=config_name)
        if flags.help:
            sys.stdout.write(help_text(program=program, config_name=flags.config_name, purpose=purpose))
            return 0
        composed = compose_run(flags.overrides, config_name=flags.config_name, config_dir=flags.config_dir)
        if flags.cfg:
            sys.stdout.write(config_text(composed))
            return 0
        # Imported here, so that a wrong setting is reported before torch is loaded.
        from hybridflow.launch.execute import execute
        from hybridflow.launch.farewell import say_finished
        from hybridflow.launch.prepare import prepare

        prepared = prepare(composed)
        status = 1
        say_finished(execute(prepared, console), console)
        return 0
    except HybridflowError as error:
        say_failure(console, error)
        return status
    except KeyboardInterrupt:
        console.print("\n[yellow]interrupted[/]  The same command goes on from the last checkpoint.")
        return 130
