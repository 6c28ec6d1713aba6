"""`python -m hybridflow.trainer.main_dpo`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(
        argv,
        config_name="dpo",
        purpose="Trains a language model on pairs of responses (DPO; also IPO, SLiC, ORPO, SimPO).",
    )


if __name__ == "__main__":
    sys.exit(main())
