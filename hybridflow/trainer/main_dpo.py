"""`python -m hybridflow.trainer.main_dpo`, the same as `hybridflow dpo`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(argv, "dpo", program="python -m hybridflow.trainer.main_dpo")


if __name__ == "__main__":
    sys.exit(main())
