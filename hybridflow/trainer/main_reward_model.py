"""`python -m hybridflow.trainer.main_reward_model`, the same as `hybridflow reward-model`: see `--help`."""

from functools import partial

from hybridflow.launch.command import run_command
from hybridflow.process import end

main = partial(run_command, command="reward_model", program="python -m hybridflow.trainer.main_reward_model")

if __name__ == "__main__":
    end(main())
