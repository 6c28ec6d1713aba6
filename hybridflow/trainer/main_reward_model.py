"""`python -m hybridflow.trainer.main_reward_model`, the same as `hybridflow reward-model`: see `--help`."""

import sys
from functools import partial

from hybridflow.launch.command import run_command

main = partial(run_command, command="reward_model", program="python -m hybridflow.trainer.main_reward_model")

if __name__ == "__main__":
    sys.exit(main())
