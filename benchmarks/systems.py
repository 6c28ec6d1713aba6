"""The systems measured on workload W: the command that runs each of them, and how its seconds per step are read."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from workload import NUM_PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES_PER_PROMPT, Workload

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
PEER_SCRIPTS = {"grpo": ("trl", "trl_grpo.py"), "ppo": ("trl_ppo", "trl_ppo.py")}
"""For each algorithm, the peer's environment below .peers/ and its script in benchmarks/peers/."""


class RunFailed(Exception):
    """A system could not be measured; the message ends with the last lines of what it wrote."""


@dataclass(frozen=True)
class Case:
    """One system doing one algorithm on one model. `recomputes`: old logprobs by a forward pass of their own."""

    system: str
    algorithm: str
    size: str
    rollout: str
    backend: str = "-"
    recomputes: bool = True

    @property
    def is_ours(self) -> bool:
        """Ours, and not a peer."""
        return self.system == "hybridflow"

    @property
    def title(self) -> str:
        """The case in words, for a line of a log."""
        old = " +old logprobs" if self.recomputes else ""
        return f"{self.system} {self.algorithm} {self.size} {self.rollout} {self.backend}{old}"


@dataclass(frozen=True)
class Effort:
    """How much is run: optimizer steps per process, threads of each, and seconds after which it is given up."""

    steps: int
    threads: int
    timeout_seconds: float


@dataclass(frozen=True)
class Measured:
    """One process: seconds of each step, and of all that was not a step (imports, loading, shutting down)."""

    step_seconds: list[float]
    other_seconds: float


def cases(sizes: list[str], algorithms: list[str], rollouts: list[str], backends: list[str]) -> list[Case]:
    """Peers and ours in the order they are run, those to be compared next to one another.

    Each system is run twice: as it is by default (no old logprobs in GRPO, generation's in PPO, whose KL penalty in the
    reward reads them), and with a forward pass for them. TRL's vLLM path always makes that pass, as does our PPO with
    vLLM.
    """
    found = []
    for size in sizes:
        for algorithm in algorithms:
            found += [Case("trl", algorithm, size, "transformers", recomputes=flag) for flag in (False, True)]
            if algorithm == "grpo" and "vllm" in rollouts:
                found.append(Case("trl", algorithm, size, "vllm"))
            for name in rollouts:
                always = algorithm == "ppo" and name == "vllm"
                found += [Case("hybridflow", algorithm, size, name, backend, always) for backend in backends]
                if not always:
                    found.append(Case("hybridflow", algorithm, size, name, backends[0]))
    return found


def measure(case: Case, workload: Workload, effort: Effort, scratch: Path) -> Measured:
    """Runs the case once in a process of its own; `scratch` is an empty directory for what it writes."""
    if case.is_ours:
        command = _our_command(case, workload, effort, scratch)
    else:
        command = _peer_command(case, workload, effort)
    started = time.perf_counter()
    output = _run(command, effort)
    seconds = _our_seconds(scratch) if case.is_ours else json.loads(output.splitlines()[-1])["seconds"]
    if len(seconds) != effort.steps:
        raise RunFailed(f"{case.title}: {len(seconds)} steps reported, {effort.steps} asked for.")
    return Measured(seconds, time.perf_counter() - started - sum(seconds))


def _our_command(case: Case, workload: Workload, effort: Effort, scratch: Path) -> list[str]:
    samples = SAMPLES_PER_PROMPT if case.algorithm == "grpo" else 1
    settings: dict[str, object] = {
        "algorithm": case.algorithm,
        "trainer.total_steps": effort.steps,
        "trainer.threads": effort.threads,
        "trainer.run_dir": scratch / "run",
        "trainer.backend": case.backend,
        "trainer.device": "cpu",
        "trainer.resume": "never",
        "trainer.trackers": "[jsonl]",
        "trainer.eval_every": 0,
        "trainer.save_every": 0,
        "trainer.samples_every": 0,
        "model.path": workload.models[case.size],
        "data.train_files": f"[{workload.prompts}]",
        "data.eval_files": "[]",
        "data.batch_size": NUM_PROMPTS * SAMPLES_PER_PROMPT // samples,
        "data.max_prompt_tokens": PROMPT_TOKENS,
        "data.max_response_tokens": RESPONSE_TOKENS,
        "rollout.engine": case.rollout,
        "rollout.samples_per_prompt": samples,
        "rollout.sampling.ignore_eos": "true",
        "reward.functions": f"[{Path(__file__).parent / 'workload.py'}:digit_fraction]",
    }
    for role in ("actor", "critic"):
        settings |= {f"{role}.epochs": 1, f"{role}.minibatch_size": "null", f"{role}.optimizer.learning_rate": 1e-5}
    if case.recomputes:
        settings["algorithm.old_logprobs"] = "recompute"
    if case.algorithm == "ppo":
        settings |= {"algorithm.kl.placement": "reward", "algorithm.kl.coefficient": 0.05}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "hybridflow.trainer.main_ppo", *overrides]


def _our_seconds(scratch: Path) -> list[float]:
    lines = (scratch / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["timing_s/step"] for row in rows if "timing_s/step" in row]


def _peer_command(case: Case, workload: Workload, effort: Effort) -> list[str]:
    environment, script = PEER_SCRIPTS[case.algorithm]
    python = PEERS / environment / "bin" / "python"
    if not python.exists():
        raise RunFailed(f"{case.title}: there is no {python.relative_to(ROOT)}. Build it with: make peers")
    command = [str(python), "-W", "ignore", str(Path(__file__).parent / "peers" / script)]
    command += ["--model", str(workload.models[case.size]), "--prompts", str(workload.prompts)]
    command += ["--steps", str(effort.steps), "--threads", str(effort.threads)]
    if case.algorithm == "grpo":
        command += ["--rollout", case.rollout]
    if case.recomputes and case.rollout == "transformers":
        command.append("--recompute")
    return command


def _run(command: list[str], effort: Effort) -> str:
    """The standard output of the command."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(effort.threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
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
        raise RunFailed(f"{Path(command[-1]).name}: no end after {effort.timeout_seconds:g} s.") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RunFailed(f"exit status {done.returncode} of {' '.join(command)}\n{tail}")
    return done.stdout
