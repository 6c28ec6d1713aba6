"""A small chat model learns to solve grade-school problems with DAPO, from rewards for the final answer.

Question:  does DAPO (GRPO with clip-higher, dynamic sampling, a token-level loss, and a penalty on long responses)
           raise the fraction of GSM8K problems that a model of 135 M to 500 M parameters solves?
Hardware:  one GPU with 24 GB or more for the whole run; on CPUs a few steps, to see it work.
Minutes:   not measured on a GPU yet; with `--cpu` and one core, 4 to 6 per step for Qwen2.5-Coder-0.5B (16 samples of
           at most 128 tokens, and 16 more if a group has no signal), 3 for SmolLM2-135M.
Command:   python recipes/grpo_gsm8k.py MODEL GSM8K [--cpu] [key=value ...]
           MODEL is the directory of a chat model (SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B-Instruct); GSM8K is a
           folder with train.jsonl and test.jsonl as published (columns `question` and `answer`).
Expect:    `val-core/gsm8k/reward/mean@1` rises. On CPUs, only different rewards within groups and a finite loss: two
           steps of Qwen2.5-Coder-0.5B scored -0.47 (long responses are penalized) and 0.06; SmolLM2-135M solves
           almost no problem.

Two functions score a response: `gsm8k` returns 1 for the right final answer, and `marked` below returns 0.1 for an
answer that is marked with `####`, so that it can be found. A model that can do neither learns the second first.
"""

import argparse
import re
import sys
from pathlib import Path

from hybridflow.trainer import main_ppo

INSTRUCTION = (
    "Solve the problem step by step, in a few short sentences. End with the final answer, a number alone, on a line"
    " of its own that begins with '#### '."
)
RUN_DIR = Path("runs/grpo_gsm8k")


def marked(completions: list, **columns: object) -> list[float]:
    """0.1 for a response with one marked answer: a line `#### ` and a number."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [0.1 * (len(re.findall(r"^####\s*\$?-?[\d,.]+\s*$", text, re.MULTILINE)) == 1) for text in texts]


def settings(model: str, folder: Path) -> list[str]:
    """The settings for a GPU."""
    return [
        "algorithm=dapo",
        f"model.path={model}",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.eval_files=[{folder / 'test.jsonl'}]",
        f'data.system_prompt="{INSTRUCTION}"',
        "data.as_chat=true",
        "data.max_prompt_tokens=384",
        "data.truncation=drop",
        "data.max_response_tokens=384",
        "data.batch_size=128",
        f"reward.functions=[gsm8k,{Path(__file__).resolve()}:marked]",
        f"trainer.run_dir={RUN_DIR}",
        "trainer.experiment=grpo_gsm8k",
        "trainer.total_steps=300",
        "trainer.eval_every=25",
        "trainer.save_every=50",
        "rollout.samples_per_prompt=8",
        "rollout.eval_sampling.temperature=0",
        "actor.minibatch_size=64",
        "actor.optimizer.learning_rate=2e-6",
        "actor.optimizer.warmup_steps=10",
        "actor.optimizer.weight_decay=0.01",
    ]


ON_A_CPU = [
    "data.batch_size=4",
    "data.max_response_tokens=128",
    "data.eval_limit=16",
    "rollout.samples_per_prompt=4",
    "actor.minibatch_size=4",
    "actor.optimizer.learning_rate=5e-6",
    "actor.optimizer.warmup_steps=0",
    "trainer.total_steps=4",
    "trainer.eval_every=0",
    "trainer.save_every=0",
    "trainer.samples_every=1",
    "dataflow_settings.max_refills=1",
]
"""Overrides for a few steps without a GPU."""


def main() -> int:
    """Trains; the report is in the run directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the directory of a chat model")
    parser.add_argument("data", type=Path, help="the folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("overrides", nargs="*", help="settings of the training, key=value")
    parser.add_argument("--cpu", action="store_true", help="a few small steps, for a machine without a GPU")
    given = parser.parse_intermixed_args()
    return main_ppo.main([*settings(given.model, given.data), *(ON_A_CPU if given.cpu else []), *given.overrides])


if __name__ == "__main__":
    sys.exit(main())
