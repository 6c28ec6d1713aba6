"""`python -m hybridflow.trainer.main_sft`, the same as `hybridflow sft`: see `--help`."""

from functools import partial

from hybridflow.launch.command import run_command
from hybridflow.process import end

main = partial(run_command, command="sft", program="python -m hybridflow.trainer.main_sft")

if __name__ == "__main__":
    end(main())
