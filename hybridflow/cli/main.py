"""`hybridflow COMMAND`: see `hybridflow --help`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial

from hybridflow.launch.command import ended_by_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exit status: 0 done, 2 failed for the reason printed, 130, 143 or 129 stopped by a signal."""
    with ended_by_signals():
        from hybridflow.cli import export, recipe, report, show
        from hybridflow.elastic.stopping import Stop
        from hybridflow.errors import HybridflowError
        from hybridflow.launch.messages import say_failure
        from hybridflow.observability.logs import configure_logging, lasting
        from hybridflow.observability.printable import PlainConsole
        from hybridflow.optional import check_builds
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        description="Everything but training, which is python -m hybridflow.trainer.main_ppo (see its --help).",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (export.add_command, show.add_command, recipe.add_command, report.add_command):
        add_command(partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter))
    arguments = _parsed(parser, argv)
    stop = Stop()
    with stop.handled(), redirect_stderr(lasting(sys.stderr)):
        console = PlainConsole(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
        configure_logging(None, logging.WARNING)
        try:
            check_builds()
            arguments.run(arguments, console)
            return 0
        except HybridflowError as error:
            say_failure(console, error)
            return 2
        except KeyboardInterrupt:
            console.print("\n[yellow]interrupted[/]")
            return stop.status


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but settings may also follow options, which argparse does not parse."""
    arguments, left = parser.parse_known_args(argv)
    settings = vars(arguments).get("overrides")
    if left and (settings is None or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if settings is not None:
        settings.extend(left)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
