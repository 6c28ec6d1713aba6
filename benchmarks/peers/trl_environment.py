"""Seconds in which TRL 1.16's GRPOTrainer plays 64 episodes with `environment_factory`; run by the peer's Python.

The model and the environment are those of `environments.py`. There, every reply is a step; TRL asks for tool calls, so
whatever the model says counts as a call of the environment's only tool. Measured are the calls of `_generate`, in which
TRL samples replies and calls tools, without the update. Prints one JSON line.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from delayed_environment import ANSWER, TURNS, delays

EPISODES = 64
TURN_TOKENS = 16
TEMPLATE = (
    "{%- for m in messages -%}{{ m.content }}{%- if m.role == 'assistant' -%}{%- for call in m.tool_calls or [] -%}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor -%}</s>{%- endif -%}{%- endfor -%}"
)
SEEDS = itertools.count()


class Delayed:
    """The environment as TRL expects it."""

    def reset(self, **row: object) -> None:
        """Begins with the prompt of the row."""
        self._delays = iter(delays(next(SEEDS)))

    def step(self, action: str) -> str:
        """Takes its time.

        Args:
            action: What the model says.
        """
        time.sleep(next(self._delays))
        return ANSWER

    def get_reward(self) -> float:
        """The reward of an episode."""
        return 1.0


def main() -> None:
    """Measures, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_schema = {"type": "object", "properties": {}}  # only says that there is a parser
    grpo_trainer.parse_response = lambda tokenizer, ids, **_: called(tokenizer.decode(ids))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            args=settings(scratch, options.steps),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "12+34="}]}] * EPISODES),
            processing_class=tokenizer,
            environment_factory=Delayed,
        )
        seconds: list[float] = []
        generate = trainer._generate

        def timed(prompts: list) -> tuple:
            began = time.perf_counter()
            found = generate(prompts)
            seconds.append(time.perf_counter() - began)
            masks = found[2]
            assert len(masks) == EPISODES and all(sum(mask) == TURNS * TURN_TOKENS for mask in masks), "other episodes"
            return found

        trainer._generate = timed
        trainer.train()
    sys.stdout.write(json.dumps({"seconds": seconds[1:]}) + "\n")


def called(text: str) -> dict[str, object]:
    """The text of a reply, as a call of the tool."""
    function = {"name": "step", "arguments": {"action": text}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def settings(directory: str, steps: int) -> trl.GRPOConfig:
    """Five replies of 16 tokens per episode: the answer to the last one exceeds the budget."""
    return trl.GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=EPISODES,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=TURNS * (TURN_TOKENS + len(ANSWER)) - 1,
        generation_kwargs={"min_new_tokens": TURN_TOKENS, "max_new_tokens": TURN_TOKENS},
        max_steps=steps,
        beta=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


if __name__ == "__main__":
    main()
