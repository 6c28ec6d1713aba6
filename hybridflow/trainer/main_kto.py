"""`python -m hybridflow.trainer.main_kto`, the same as `hybridflow kto`: see `--help`."""

from functools import partial

from hybridflow.launch.command import run_command
from hybridflow.process import end

main = partial(run_command, command="kto", program="python -m hybridflow.trainer.main_kto")

if __name__ == "__main__":
    end(main())
