"""`python -m hybridflow.launch.nodes NODE ...`: waits until the nodes of a job see one another."""

import argparse
import sys
from collections.abc import Sequence

from hybridflow.controller.backends.ray.nodes import await_nodes
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.launch.messages import say_failure
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.printable import error_console


def main(arguments: Sequence[str] | None = None) -> int:
    """Waits for the nodes; returns 0, or 1 after an error that names those that are missing."""
    parser = argparse.ArgumentParser(prog="python -m hybridflow.launch.nodes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NODE", help="the names that ray start gave to the nodes")
    parser.add_argument("--count", type=int, help="the number of nodes, if their names are not known")
    parser.add_argument("--gpus", type=int, default=0, help="the GPUs that each node must have")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to wait")
    given = parser.parse_args(arguments)
    configure_logging(None)
    try:
        if not given.names and not given.count:
            raise ConfigError("No nodes are given.", remedy="Give their names, or --count.")
        await_nodes(given.names, given.count or len(given.names), gpus=given.gpus, seconds=given.seconds)
    except HybridflowError as error:
        say_failure(error_console(), error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
