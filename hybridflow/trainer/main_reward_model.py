"""`python -m hybridflow.trainer.main_reward_model`, the same as `hybridflow reward-model`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(argv, "reward_model", program="python -m hybridflow.trainer.main_reward_model")


if __name__ == "__main__":
    sys.exit(main())
