"""Seconds a step of TRL 1.16's GRPOTrainer on workload W; run by the peer's own python, prints one JSON line.

Arrangement, chosen in TRL's favour: one micro-batch of 256 sequences, no reference model (beta 0), nothing logged,
saved or evaluated. With transformers generation TRL recomputes no old logprobs; with vLLM it does.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a field `prompt`")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rollout", choices=("transformers", "vllm"), default="transformers")
    options = parser.parse_args()
    set_environment(options.threads)
    seconds = measure(options.model, options.prompts, options.steps, options.threads, options.rollout)
    sys.stdout.write(json.dumps(seconds) + "\n")


def set_environment(threads: int) -> None:
    """Threads and vLLM's switches, before torch is imported."""
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        TORCHDYNAMO_DISABLE="1",
    )


def keep_plain_vllm_weights() -> None:
    """vLLM's CPU layers repack their weights, after which TRL's `load_weights` fails: keep them as they are."""
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as layers

    def plain(layer, remove_weight):  # noqa: ANN001, ANN202
        layer.cpu_linear = F.linear

    layers.dispatch_cpu_unquantized_gemm = plain


def measure(model_path: Path, prompts: Path, steps: int, threads: int, rollout: str) -> dict[str, object]:
    """Run `steps` steps and report the seconds from the end of one step to the end of the next."""
    started = time.perf_counter()
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from workload import NUM_PROMPTS, RESPONSE_TOKENS, SAMPLES_PER_PROMPT, digit_fraction

    torch.set_num_threads(threads)
    is_vllm = rollout == "vllm"
    if is_vllm:
        keep_plain_vllm_weights()
    sequences = NUM_PROMPTS * SAMPLES_PER_PROMPT
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):  # noqa: ANN001, ANN202
            ends.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):  # noqa: ANN001, ANN202
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl.GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=sequences,
            gradient_accumulation_steps=1,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=RESPONSE_TOKENS,
            generation_kwargs={"ignore_eos": True} if is_vllm else {"min_new_tokens": RESPONSE_TOKENS},
            max_steps=steps,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            use_vllm=is_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=128,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=digit_fraction,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(model_path),
            callbacks=[Clock()],
        )
        trainer.train()
    return {
        "system": f"trl {trl.__version__}",
        "algorithm": "grpo",
        "rollout": rollout,
        "seconds": [after - before for before, after in zip(ends, ends[1:], strict=False)],
        "seconds_to_first_step": ends[1] - started,
        "tokens": sequences * RESPONSE_TOKENS,
        "threads": torch.get_num_threads(),
        "old_logprobs": "recomputed" if is_vllm else "none",
        "reference": False,
    }


if __name__ == "__main__":
    main()
