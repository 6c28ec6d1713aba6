"""`python -m hybridflow.trainer.main_dpo`, the same as `hybridflow dpo`: see `--help`."""

from functools import partial

from hybridflow.launch.command import run_command
from hybridflow.process import end

main = partial(run_command, command="dpo", program="python -m hybridflow.trainer.main_dpo")

if __name__ == "__main__":
    end(main())
