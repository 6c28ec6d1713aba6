"""`python -m hybridflow COMMAND`: the same as `hybridflow COMMAND`."""

from typing import NoReturn

from hybridflow.cli.main import main
from hybridflow.process import end


def command() -> NoReturn:
    """Runs the command line of this process, and ends it."""
    end(main())


if __name__ == "__main__":
    command()
