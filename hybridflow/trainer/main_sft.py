"""`python -m hybridflow.trainer.main_sft`, the same as `hybridflow sft`: see `--help`."""

import sys
from functools import partial

from hybridflow.launch.command import run_command

main = partial(run_command, command="sft", program="python -m hybridflow.trainer.main_sft")

if __name__ == "__main__":
    sys.exit(main())
