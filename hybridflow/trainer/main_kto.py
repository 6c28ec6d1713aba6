"""`python -m hybridflow.trainer.main_kto`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(
        argv, config_name="kto", purpose="Trains a language model on single responses that people like or do not (KTO)."
    )


if __name__ == "__main__":
    sys.exit(main())
