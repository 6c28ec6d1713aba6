"""`python -m hybridflow.trainer.main_ppo`, the same as `hybridflow ppo`: see `--help`."""

import sys
from functools import partial

from hybridflow.launch.command import run_command

main = partial(run_command, command="ppo", program="python -m hybridflow.trainer.main_ppo")

if __name__ == "__main__":
    sys.exit(main())
