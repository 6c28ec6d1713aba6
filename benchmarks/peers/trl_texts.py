"""Seconds per step of TRL 1.16's DPO, SFT and reward trainers on workload H; run by that environment's Python.

Configured in TRL's favor: one microbatch, no gradient checkpointing, nothing logged, saved or evaluated. Batches are
padded, TRL's default; it packs and removes padding only with FlashAttention kernels, which a CPU does not have. Prints
one JSON line.
"""

import argparse
import json
import sys
import tempfile

import torch
import trl
from clock import StepClock
from command_line import step_parser
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from workload import SHAPES

TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "reward_model": (trl.RewardTrainer, trl.RewardConfig),
}


def main() -> None:
    """Measure as the command line says."""
    rows = "JSON lines: prompt and chosen, rejected or completion"
    parser = step_parser(__doc__, workloads=("H",), rows=rows)
    parser.add_argument("--algorithm", choices=list(TRAINERS), required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer_class, config_class = TRAINERS[options.algorithm]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_class(
            model=model(options),
            args=config_class(**settings(scratch, options)),
            train_dataset=Dataset.from_json(str(options.rows)),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[clock],
            **({"ref_model": model(options)} if options.algorithm == "dpo" else {}),
        )
        trainer.train()
    sys.stdout.write(json.dumps(clock.measured()) + "\n")


def model(options: argparse.Namespace) -> torch.nn.Module:
    """The model, in float32; with a scalar head for rewards."""
    if options.algorithm == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)


def settings(directory: str, options: argparse.Namespace) -> dict[str, object]:
    """Settings that the configurations of the three trainers have in common."""
    shape = SHAPES[options.workload]
    return {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": shape.prompts,
        "gradient_accumulation_steps": 1,
        "max_length": shape.prompt_tokens + shape.response_tokens + 2,
        "max_steps": options.steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


if __name__ == "__main__":
    main()
