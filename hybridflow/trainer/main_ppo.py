"""`python -m hybridflow.trainer.main_ppo`, the same as `hybridflow ppo`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(argv, "ppo", program="python -m hybridflow.trainer.main_ppo")


if __name__ == "__main__":
    sys.exit(main())
