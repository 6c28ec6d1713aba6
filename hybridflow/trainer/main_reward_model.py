"""`python -m hybridflow.trainer.main_reward_model`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(
        argv, config_name="reward_model", purpose="Trains a reward model on pairs of which one response is preferred."
    )


if __name__ == "__main__":
    sys.exit(main())
