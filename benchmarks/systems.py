"""The systems measured by step.py: the command that runs each of them, and how its seconds per step are read."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from workload import SHAPES, Workload

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
PEERS = ROOT / ".peers"
PEER_SCRIPTS = {
    ("trl", "grpo"): ("trl", "trl_grpo.py"),
    ("trl", "ppo"): ("trl_ppo", "trl_ppo.py"),
    ("trl", "dpo"): ("trl", "trl_texts.py"),
    ("trl", "sft"): ("trl", "trl_texts.py"),
    ("trl", "reward_model"): ("trl", "trl_texts.py"),
    ("verl", "grpo"): ("verl", "verl_rl.py"),
    ("verl", "ppo"): ("verl", "verl_rl.py"),
}
"""For each peer and algorithm, the environment below .peers/ and the script in benchmarks/peers/."""

SAMPLING = ("grpo", "ppo")
"""The algorithms that generate; the others learn from texts."""


class RunFailed(Exception):
    """A system could not be measured; the message ends with the last lines of what it wrote."""


@dataclass(frozen=True)
class Case:
    """One system doing one algorithm on one workload and model. `recomputes`: old logprobs by a forward pass.

    `dtype` is that of the products; the optimizer's weights are in fp32.
    """

    system: str
    algorithm: str
    size: str
    rollout: str = "-"
    backend: str = "-"
    recomputes: bool = False
    workload: str = "W"
    dtype: str = "float32"

    @property
    def is_ours(self) -> bool:
        """Ours, and not a peer."""
        return self.system == "hybridflow"

    @property
    def is_default(self) -> bool:
        """Old logprobs are as the system has them by default; verl's always come from a forward pass."""
        return not self.recomputes or self.system == "verl"

    @property
    def task(self) -> tuple[str, str, str]:
        """Workload, algorithm and size, which cases that are compared with one another have in common."""
        return self.workload, self.algorithm, self.size

    @property
    def title(self) -> str:
        """The case in words, for a line of a log."""
        old = " +old logprobs" if self.recomputes else ""
        dtype = "" if self.dtype == "float32" else f" {self.dtype}"
        return f"{self.workload} {self.system} {self.algorithm} {self.size} {self.rollout} {self.backend}{old}{dtype}"


@dataclass(frozen=True)
class Effort:
    """How much is run: optimizer steps per process, threads of each, and seconds after which it is given up."""

    steps: int
    threads: int
    timeout_seconds: float


@dataclass(frozen=True)
class Measured:
    """One process: seconds and processor seconds of each step, seconds of all that was not a step (imports, loading,
    shutting down), and the machine's matrix rate just before it, in operations per second."""

    step_seconds: list[float]
    cpu_seconds: list[float]
    other_seconds: float
    matrix_rate: float


def cases(
    workloads: list[str], sizes: list[str], algorithms: list[str], rollouts: list[str], backends: list[str]
) -> list[Case]:
    """Peers and ours in the order they are run, those to be compared next to one another."""
    found = []
    for workload in workloads:
        for size in (name for name in sizes if name in SHAPES[workload].sizes):
            for algorithm in (name for name in algorithms if name in SHAPES[workload].algorithms):
                if algorithm in SAMPLING:
                    found += _sampling(workload, size, algorithm, rollouts, backends)
                else:
                    found.append(Case("trl", algorithm, size, workload=workload))
                    found += [Case("hybridflow", algorithm, size, "-", name, workload=workload) for name in backends]
    return found


def _sampling(workload: str, size: str, algorithm: str, rollouts: list[str], backends: list[str]) -> list[Case]:
    """Each system is run twice: as it is by default (no old logprobs in GRPO, generation's in PPO, whose KL penalty in
    the reward reads them), and with a forward pass for them. TRL's vLLM path always makes that pass, as does our PPO
    with vLLM. verl, if it is there, has one way: vLLM, and the forward pass."""
    found = []
    if "transformers" in rollouts:
        found += [Case("trl", algorithm, size, "transformers", "-", flag, workload) for flag in (False, True)]
    if algorithm == "grpo" and "vllm" in rollouts:
        found.append(Case("trl", algorithm, size, "vllm", "-", True, workload))
    if workload == "W" and python_of("verl").exists():
        found.append(Case("verl", algorithm, size, "vllm", "-", True, workload))
    for name in rollouts:
        always = algorithm == "ppo" and name == "vllm"
        found += [Case("hybridflow", algorithm, size, name, backend, always, workload) for backend in backends]
        if not always:
            found.append(Case("hybridflow", algorithm, size, name, backends[0], True, workload))
    if (workload, size, algorithm) == ("W", "ten", "grpo") and "transformers" in rollouts:
        found.append(Case("hybridflow", algorithm, size, "transformers", backends[0], False, workload, "bfloat16"))
    return found


def measure(case: Case, workload: Workload, effort: Effort, scratch: Path) -> Measured:
    """Runs the case once in a process of its own; `scratch` is an empty directory for what it writes."""
    if case.is_ours:
        algorithm, settings = case.algorithm, our_settings(case, workload, effort, scratch)
        command = [sys.executable, str(HERE / "own_run.py"), algorithm, json.dumps(settings)]
    else:
        command = _peer_command(case, workload, effort)
    rate = json.loads(_run([sys.executable, str(HERE / "matrix_rate.py"), str(effort.threads)], effort))["flops"]
    started = time.perf_counter()
    report = json.loads(_run(command, effort).splitlines()[-1])
    seconds = report["seconds"]
    if len(seconds) != effort.steps:
        raise RunFailed(f"{case.title}: {len(seconds)} steps reported, {effort.steps} asked for.")
    return Measured(seconds, report["cpu_seconds"], time.perf_counter() - started - sum(seconds), rate)


def our_settings(case: Case, workload: Workload, effort: Effort, scratch: Path) -> dict[str, object]:
    """The settings of our run of a case."""
    shape = SHAPES[case.workload]
    settings: dict[str, object] = {
        "trainer.total_steps": effort.steps,
        "trainer.threads": effort.threads,
        "trainer.run_dir": str(scratch / "run"),
        "trainer.backend": case.backend,
        "trainer.device": "cpu",
        "trainer.resume": "never",
        "trainer.trackers": ["jsonl"],
        "trainer.eval_every": 0,
        "trainer.save_every": 0,
        "trainer.samples_every": 0,
        "model.path": str(workload.models[case.size]),
        "model.dtype": case.dtype,
        "data.train_files": [str(workload.rows_for(case.workload, case.algorithm))],
        "data.eval_files": [],
        "data.batch_size": shape.prompts,
        "data.max_prompt_tokens": shape.prompt_tokens,
        "data.max_response_tokens": shape.response_tokens + (case.algorithm not in SAMPLING),  # end of sequence
    }
    if case.algorithm in SAMPLING:
        samples = shape.samples if case.algorithm == "grpo" else 1
        settings |= {
            "data.batch_size": shape.sequences // samples,
            "rollout.engine": case.rollout,
            "rollout.samples_per_prompt": samples,
            "rollout.sampling.ignore_eos": True,
            "reward.functions": [f"{HERE / 'workload.py'}:digit_fraction"],
        }
    for role in ("actor", "critic") if case.algorithm == "ppo" else ("actor",):
        settings |= {f"{role}.epochs": 1, f"{role}.minibatch_size": None, f"{role}.optimizer.learning_rate": 1e-5}
    if case.recomputes:
        settings["algorithm.old_logprobs"] = "recompute"
    if case.algorithm == "ppo":
        settings |= {"algorithm.kl.placement": "reward", "algorithm.kl.coefficient": 0.05}
    return settings


def python_of(environment: str) -> Path:
    """The interpreter of a peer's environment, which may not have been built."""
    return PEERS / environment / "bin" / "python"


def _peer_command(case: Case, workload: Workload, effort: Effort) -> list[str]:
    environment, script = PEER_SCRIPTS[case.system, case.algorithm]
    python = python_of(environment)
    if not python.exists():
        raise RunFailed(f"{case.title}: there is no {python.relative_to(ROOT)}. Build it with: make peers")
    command = [str(python), "-W", "ignore", str(HERE / "peers" / script), "--workload", case.workload]
    command += ["--model", str(workload.models[case.size])]
    command += ["--rows", str(workload.rows_for(case.workload, case.algorithm))]
    command += ["--steps", str(effort.steps), "--threads", str(effort.threads)]
    if case.algorithm not in SAMPLING or case.system == "verl":
        command += ["--algorithm", case.algorithm]
    if case.algorithm == "grpo" or case.system == "verl":
        command += ["--rollout", case.rollout]
    if case.recomputes and case.rollout == "transformers":
        command.append("--recompute")
    return command


def _run(command: list[str], effort: Effort) -> str:
    """The standard output of the command."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(effort.threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=effort.timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{Path(command[1]).name}: no end after {effort.timeout_seconds:g} s.") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RunFailed(f"exit status {done.returncode} of {' '.join(command)}\n{tail}")
    return done.stdout
