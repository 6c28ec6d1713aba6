"""Real runs on this machine for `planning_here.py`: their settings, and the commands that start them."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import HERE, environment
from benchmarks.workload import ModelSize, arithmetic_prompts, save_random_llama

LLAMA_100M = ModelSize(hidden=768, intermediate=2560, layers=12, heads=12, kv_heads=12, head_size=64)
STEPS = {"built-in": 5, "stories15M": 3, "llama100M": 3}
"""Models, and the steps of a run, of which the first is not counted."""

PROMPT_TOKENS, RESPONSE_TOKENS = 16, 32
_TIMEOUT_SECONDS = 300
_ANIMALS = ("dog", "cat", "pig", "hen", "cow", "fox", "owl", "bee")
_COLORS = ("red", "blue", "green", "white", "black", "brown", "pink", "gray")


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    model: str
    processes: int
    engine: str
    rollout: str = "transformers"
    tensor: int = 1
    placement: str = "colocated"

    @property
    def layout(self) -> str:
        """`4 megatron t2 transformers`."""
        tensor = f" t{self.tensor}" if self.tensor > 1 else ""
        placement = f" {self.placement}" if self.placement != "colocated" else ""
        return f"{self.processes} {self.engine}{tensor} {self.rollout}{placement}"

    @property
    def title(self) -> str:
        """`stories15M 4 megatron t2 transformers`."""
        return f"{self.model} {self.layout}"

    @property
    def command(self) -> str:
        """PPO; GRPO if a critic would take too long."""
        return "grpo" if self.model == "llama100M" else "ppo"


class RunFailed(Exception):
    """A run did not end well; the message has its last lines."""


def all_cases() -> list[Case]:
    """Every engine on 1, 2 and 4 processes."""
    layouts = [
        Case("", 1, "single"),
        Case("", 1, "single", "vllm"),
        Case("", 2, "fsdp"),
        Case("", 2, "megatron"),
        Case("", 2, "fsdp", "vllm"),
        Case("", 4, "fsdp"),
        Case("", 4, "megatron", tensor=2),
    ]
    return [replace(layout, model=model) for model in STEPS for layout in layouts]


def run(case: Case, scratch: Path, assets: Path) -> Path:
    """Runs a case in processes of its own; returns its run directory. Models and prompts are made in `scratch`."""
    run_dir = scratch / case.title.replace(" ", "_")
    words = [
        f"{key}={value}" for key, value in (_settings(case, scratch, assets) | {"trainer.run_dir": run_dir}).items()
    ]
    shutil.rmtree(run_dir, ignore_errors=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hybridflow", case.command, *words],
            env=environment(HF_HUB_OFFLINE="1"), cwd=HERE.parent, capture_output=True, text=True,
            timeout=_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{case.title}: no end after {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        raise RunFailed(f"{case.title}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return run_dir


def _settings(case: Case, scratch: Path, assets: Path) -> dict[str, object]:
    """All responses of the two larger models have the same length."""
    sections = ["actor"] if case.command == "grpo" else ["actor", "critic"]
    settings: dict[str, object] = {
        "trainer.total_steps": STEPS[case.model],
        "trainer.threads": 1,
        "trainer.device": "cpu",
        "trainer.devices": case.processes,
        "trainer.resume": "never",
        "trainer.trackers": "[jsonl]",
        "trainer.eval_every": 0,
        "trainer.save_every": 0,
        "trainer.samples_every": 0,
        "rollout.engine": case.rollout,
        "algorithm.old_logprobs": "recompute",
        "placement": "given" if case.placement == "colocated" else case.placement,
    }
    settings |= {f"{section}.engine": case.engine for section in sections}
    settings |= {f"{section}.parallelism.tensor": case.tensor for section in sections}
    if case.model == "built-in":
        return settings
    model, prompts = _files(case.model, scratch, assets)
    one_step = {"epochs": 1, "minibatch_size": "null", "optimizer.learning_rate": 1e-5}
    settings |= {f"{section}.{key}": value for section in sections for key, value in one_step.items()}
    return settings | {
        "model.path": model,
        "data.train_files": f"[{prompts}]",
        "data.eval_files": "[]",
        "data.batch_size": 4 if case.command == "grpo" else 64,
        "data.max_prompt_tokens": PROMPT_TOKENS,
        "data.max_response_tokens": RESPONSE_TOKENS,
        "rollout.samples_per_prompt": 4 if case.command == "grpo" else 1,
        "rollout.sampling.ignore_eos": "true",
        "reward.functions": f"[{HERE / 'workload.py'}:digit_fraction]",
    }


def _files(model: str, scratch: Path, assets: Path) -> tuple[Path, Path]:
    """The directory of a model, and a file of prompts of about PROMPT_TOKENS tokens."""
    directory, texts = scratch / model, arithmetic_prompts(256)
    if model == "stories15M":
        directory = assets / "models" / model
        texts = [
            f"Once upon a time there was a {color} {animal} who liked to run"
            for color in _COLORS
            for animal in _ANIMALS
        ]
    elif not (directory / "config.json").exists():
        save_random_llama(LLAMA_100M, directory)
    prompts = scratch / f"{model}.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return directory, prompts
