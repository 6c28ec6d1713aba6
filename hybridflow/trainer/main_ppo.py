"""`python -m hybridflow.trainer.main_ppo`, the same as `hybridflow ppo`: see `--help`.

It also accepts the overrides of `python3 -m verl.trainer.main_ppo`.
"""

from functools import partial

from hybridflow.launch.command import run_command
from hybridflow.process import end

main = partial(run_command, command="ppo", program="python -m hybridflow.trainer.main_ppo", accepts_verl=True)

if __name__ == "__main__":
    end(main())
