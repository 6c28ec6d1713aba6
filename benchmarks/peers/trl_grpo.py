"""Seconds per step of TRL 1.16's GRPOTrainer on workload W, P or G; run by the peer's Python, prints one JSON line.

Configured in TRL's favor: one microbatch of all sequences, no reference model (beta 0), nothing logged, saved or
evaluated. With transformers generation TRL computes no old logprobs, for they equal the update's; with vLLM it does.
`--recompute` asks TRL for them in the first case too, as it does itself when batches are reused.
"""

import argparse
import functools
import json
import os
import sys
import tempfile

import torch
import trl
from clock import StepClock
from command_line import step_parser
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import SHAPES, digit_fraction


def main() -> None:
    """Measure as the command line says."""
    parser = step_parser(__doc__, workloads=("W", "P", "G"))
    parser.add_argument("--rollout", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--recompute", action="store_true", help="old logprobs by a forward pass of their own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda computes in bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.rollout == "vllm":
        prepare_vllm()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measured_steps(options, settings(scratch, options))
    sys.stdout.write(json.dumps(measured) + "\n")


def settings(directory: str, options: argparse.Namespace) -> trl.GRPOConfig:
    """TRL's configuration of the workload's GRPO step."""
    is_vllm, is_cpu, shape = options.rollout == "vllm", options.device == "cpu", SHAPES[options.workload]
    return trl.GRPOConfig(
        output_dir=directory,
        use_cpu=is_cpu,
        bf16=not is_cpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=shape.sequences,
        gradient_accumulation_steps=1,
        num_generations=shape.samples,
        max_completion_length=shape.response_tokens,
        generation_kwargs={"ignore_eos": True} if is_vllm else {"min_new_tokens": shape.response_tokens},
        max_steps=options.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        use_vllm=is_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=512,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def measured_steps(options: argparse.Namespace, config: trl.GRPOConfig) -> dict[str, list[float]]:
    """Seconds and processor seconds of each step."""
    clock = StepClock()
    trainer_class = RecomputingTrainer if options.recompute else trl.GRPOTrainer
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=digit_fraction,
        args=config,
        train_dataset=Dataset.from_json(str(options.rows)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[clock],
    )
    trainer.train()
    return clock.measured()


class RecomputingTrainer(trl.GRPOTrainer):
    """Computes the old logprobs before the update, by the call that TRL itself makes for reused batches."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, batch["completion_ids"].size(1)
            )
        return batch | {"old_per_token_logps": logprobs}


def prepare_vllm() -> None:
    """Settings that vLLM on a CPU needs and TRL does not make: unpacked weights, no compilation, fp32.

    Its CPU layers repack their weights, after which TRL's `load_weights` fails; and TRL passes neither
    `enforce_eager` (vLLM would compile first) nor `dtype` (vLLM would pick bfloat16 for an fp32 model).
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    import trl.generation.vllm_generation as generation
    import vllm.model_executor.layers.utils as layers

    def keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_plain
    torch._dynamo.config.disable = True
    generation.LLM = functools.partial(generation.LLM, enforce_eager=True, dtype="float32")


if __name__ == "__main__":
    main()
