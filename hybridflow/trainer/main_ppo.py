"""`python -m hybridflow.trainer.main_ppo`: see `--help`."""

import sys
from collections.abc import Sequence

from hybridflow.launch.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run_command(
        argv,
        config_name="ppo",
        purpose="Trains a language model by reinforcement learning: PPO, GRPO or a dataflow of your own.",
    )


if __name__ == "__main__":
    sys.exit(main())
