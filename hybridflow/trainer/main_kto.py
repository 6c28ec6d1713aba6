"""`python -m hybridflow.trainer.main_kto`, the same as `hybridflow kto`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(argv, "kto", program="python -m hybridflow.trainer.main_kto")


if __name__ == "__main__":
    sys.exit(main())
