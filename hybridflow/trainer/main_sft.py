"""`python -m hybridflow.trainer.main_sft`, the same as `hybridflow sft`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(argv, "sft", program="python -m hybridflow.trainer.main_sft")


if __name__ == "__main__":
    sys.exit(main())
