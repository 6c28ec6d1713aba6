"""A stand-in for Slurm's commands: one job, whose nodes are addresses of this machine and whose steps are processes."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.2", "127.0.0.3")

_COMMANDS = {
    "sbatch": """
cp "$1" "$STAND_IN/job.sh"
(
  restarts=0
  until [[ -e $STAND_IN/status ]]; do
    rm -f "$STAND_IN/requeued"
    echo RUNNING > "$STAND_IN/state"
    SLURM_JOB_ID=$((BASHPID + 100000)) SLURM_JOB_NODELIST=$NODES SLURM_RESTART_COUNT=$restarts \\
      bash "$STAND_IN/job.sh" >> "$STAND_IN/output" 2>&1 &
    echo $! > "$STAND_IN/batch_process"
    wait $!
    status=$?
    [[ -e $STAND_IN/requeued ]] || echo $status > "$STAND_IN/status"
    restarts=$((restarts + 1))
  done
) < /dev/null > /dev/null 2>&1 &
echo "Submitted batch job 1"
""",
    "srun": """
while [[ $1 == --* ]]; do
  [[ $1 != --nodelist=* ]] || export SLURMD_NODENAME=${1#--nodelist=}
  shift
done
exec setsid "$@"
""",
    "scontrol": """
if [[ $1 == requeue ]]; then touch "$STAND_IN/requeued"; else tr , '\\n' <<< "$3"; fi
""",
    "squeue": """
cat "$STAND_IN/state"
""",
}


class StandIn:
    """The commands in a directory of their own, and the state of the one job that they know.

    environment = stand_in.environment  # for `hybridflow launch --on slurm`
    stand_in.kill_node("127.0.0.3")
    assert stand_in.status() == 0
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...] = NODES) -> None:
        self._folder = folder
        commands = folder / "bin"
        commands.mkdir(parents=True)
        for name, text in _COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash{text}")
            (commands / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM"))}
        self.environment = kept | {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "STAND_IN": str(folder),
            "NODES": ",".join(nodes),
        }

    @property
    def output(self) -> str:
        """What the job has written."""
        file = self._folder / "output"
        return file.read_text() if file.exists() else ""

    def status(self, seconds: float) -> int:
        """The exit status of the job once it has ended and is not requeued."""
        file, until = self._folder / "status", time.monotonic() + seconds
        while not (file.exists() and file.read_text()):
            if time.monotonic() > until:
                raise TimeoutError(self.output)
            time.sleep(0.2)
        return int(file.read_text())

    def notify(self) -> None:
        """Sends Slurm's notice, of `--signal=B:USR1@N`, to the batch script."""
        os.kill(int((self._folder / "batch_process").read_text()), signal.SIGUSR1)

    def cancel(self) -> None:
        """Does as `scancel`: the job leaves the state RUNNING, and its script receives SIGTERM."""
        (self._folder / "state").write_text("COMPLETING\n")
        os.kill(int((self._folder / "batch_process").read_text()), signal.SIGTERM)

    def kill_node(self, name: str) -> None:
        """Kills all processes of a node."""
        for process in self._processes(f"SLURMD_NODENAME={name}"):
            process.send_signal(signal.SIGKILL)

    def close(self) -> list[str]:
        """Kills the processes of the job that are left after a few seconds; returns their names."""
        _, left = psutil.wait_procs(self._processes(), timeout=5)
        for process in left:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=20)
        return [process.info["name"] for process in left]

    def _processes(self, *variables: str) -> list[psutil.Process]:
        """The processes of the job whose environment has the variables."""
        wanted = {f"STAND_IN={self._folder}", *variables}
        found = []
        for process in psutil.process_iter(["name", "environ"]):
            of_process = process.info["environ"] or {}
            if wanted <= {f"{name}={value}" for name, value in of_process.items()}:
                found.append(process)
        return found
