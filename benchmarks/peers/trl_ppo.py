"""Seconds per step of TRL 1.12's PPOTrainer on workload W; run by that environment's Python, prints one JSON line.

Configured in TRL's favor: one epoch, one minibatch, one microbatch of 256 sequences, generation in one piece, no
gradient checkpointing, and a reward that costs nothing (TRL wants a model; this one looks digits up in a table).
TRL always runs a reference model and takes the old logprobs from generation's logits; `--recompute` replaces these
by a forward pass of their own.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import trl.experimental.ppo.ppo_trainer as ppo
from clock import StepClock
from command_line import step_parser
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workload import SHAPES


def main() -> None:
    """Measure as the command line says."""
    parser = step_parser(__doc__, workloads=("W",))
    parser.add_argument("--recompute", action="store_true", help="old logprobs by a forward pass of their own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.recompute:
        recompute_old_logprobs()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measured_steps(options.model, options.rows, settings(scratch, options))
    sys.stdout.write(json.dumps(measured) + "\n")


def settings(directory: str, options: argparse.Namespace) -> PPOConfig:
    """TRL's configuration of the workload's PPO step."""
    shape = SHAPES[options.workload]
    return PPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=shape.sequences,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=shape.sequences,
        response_length=shape.response_tokens,
        total_episodes=options.steps * shape.sequences,
        num_sample_generations=0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        kl_coef=0.05,
        temperature=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def measured_steps(model: Path, prompts: Path, config: PPOConfig) -> dict[str, list[float]]:
    """Seconds and processor seconds of each step."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    rows = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})
    clock = StepClock()
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_model=DigitReward([tokenizer.decode([i]).isdigit() for i in range(len(tokenizer))]),
        value_model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[clock],
    )
    trainer.train()
    return clock.measured()


def recompute_old_logprobs() -> None:
    """TRL's loop gets the logits of a forward pass over the finished sequences in place of generation's."""
    generate = ppo.batch_generation

    @torch.no_grad()
    def generate_then_forward(model, queries, rows, pad_token_id, generation_config):
        sequences, _ = generate(model, queries, rows, pad_token_id, generation_config)
        logits = ppo.forward(model, sequences, pad_token_id).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / generation_config.temperature

    ppo.batch_generation = generate_then_forward


class DigitTable(torch.nn.Module):
    """Stands where TRL expects a reward model's backbone: its last hidden state is the share of digits so far."""

    def __init__(self, is_digit: list[bool]) -> None:
        super().__init__()
        self.register_buffer("is_digit", torch.tensor(is_digit, dtype=torch.float32))

    def forward(self, input_ids: torch.Tensor, **unused: object) -> BaseModelOutput:
        """`hidden_states[-1]` [B, T, 1]."""
        share = self.is_digit[input_ids].cumsum(1) / input_ids.shape[1]
        return BaseModelOutput(hidden_states=(share.unsqueeze(-1),))


class DigitReward(torch.nn.Module):
    """The workload's reward in the shape of TRL's reward models: a backbone and a `score` of its hidden states."""

    base_model_prefix = "table"

    def __init__(self, is_digit: list[bool]) -> None:
        super().__init__()
        self.table = DigitTable(is_digit)
        self.score = torch.nn.Identity()


if __name__ == "__main__":
    main()
