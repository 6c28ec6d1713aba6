"""Seconds per step of verl 0.9.1's GRPO or PPO on workload W; run by the peer's Python, prints one JSON line.

verl's own trainer (RayPPOTrainer), FSDP engine and vLLM server, with one rank each, on a CPU (see `verl_on_cpu.py`).
Configured in verl's favor: one microbatch of all sequences, no reference model in GRPO, one worker for the agent loop
and one for rewards, nothing logged, saved or evaluated; and `use_v1=False`, because its newer trainer, which keeps each
sequence in a transfer queue, took longer in the one run that was compared. As by default, old logprobs come from a
forward pass. verl has several processes; their processor seconds are counted together.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import verl_on_cpu
from command_line import step_parser
from workload import SHAPES, Shape, digit_fraction

FLOAT32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"


def main() -> None:
    """Measure as the command line says."""
    parser = step_parser(__doc__, workloads=("W",))
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--rollout", choices=("vllm",), default="vllm")
    options = parser.parse_args()
    prepare_processes(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        measured = measured_steps(options, Path(scratch))
    sys.stdout.write(json.dumps(measured) + "\n")


def prepare_processes(threads: int) -> None:
    """The environment of verl's processes, which Ray starts with that of this one."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ.update(verl_on_cpu.ENVIRONMENT)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(paths),
        OMP_NUM_THREADS=str(threads),
        RAY_USAGE_STATS_ENABLED="0",
        VERL_LOGGING_LEVEL="ERROR",  # or a warning is printed for each sequence
        VLLM_LOGGING_LEVEL="ERROR",
    )


def measured_steps(options: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds and processor seconds of each step."""
    import ray
    from hydra import compose, initialize_config_module
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.config import validate_config

    rows, times = scratch / "rows.jsonl", scratch / "times.json"
    write_rows(options.rows, rows)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=settings(options, SHAPES[options.workload], rows))
    is_ppo = options.algorithm == "ppo"
    validate_config(config=config, use_reference_policy=is_ppo, use_critic=is_ppo)
    run_ppo(config, timed_runner(times, os.getpid()))
    ray.shutdown()
    return json.loads(times.read_text())


def write_rows(source: Path, target: Path) -> None:
    """verl's rows: a conversation instead of a text, and what its reward functions are given."""
    prompts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "data_source": "workload",
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for prompt in prompts
    ]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(options: argparse.Namespace, shape: Shape, rows: Path) -> list[str]:
    """verl's configuration of the workload's step; PPO has a critic, and a KL penalty in the reward."""
    actor, model, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
    samples = shape.samples if options.algorithm == "grpo" else 1
    prompts = shape.sequences // samples
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": rows,
        "data.val_files": rows,
        "data.val_max_samples": 1,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": shape.prompt_tokens,
        "data.max_response_length": shape.response_tokens,
        "data.dataloader_num_workers": 0,
        f"{model}.custom_chat_template": "\"{{ messages[0]['content'] }}\"",  # the prompt as it is
        **_model_settings(options, shape, model=model, trained=actor, engine=f"{actor}.fsdp_config"),
        f"{actor}.ppo_mini_batch_size": prompts,
        f"{actor}.use_torch_compile": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": samples,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.dtype": "float32",
        f"{rollout}.enforce_eager": True,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": shape.sequences,
        f"{rollout}.free_cache_engine": False,  # vLLM cannot sleep on a CPU
        f"+{rollout}.enable_sleep_mode": False,
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend": "uni",  # one process fewer
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": Path(__file__),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.use_v1": False,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": options.steps,
        "trainer.val_before_train": False,
        "trainer.logger": "[]",
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.num_cpus": 8,  # what verl's actors ask for together; it limits nothing else
        "+ray_kwargs.ray_init.num_gpus": 1,  # what they call a GPU is the CPU
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    if options.algorithm == "ppo":
        reference = "actor_rollout_ref.ref"
        given |= _model_settings(options, shape, model="critic.model", trained="critic", engine="critic.fsdp")
        given |= {
            "algorithm.adv_estimator": "gae",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
            "critic.ppo_mini_batch_size": prompts,
            f"{reference}.log_prob_micro_batch_size_per_gpu": shape.sequences,
            f"{reference}.use_torch_compile": False,
            f"{reference}.fsdp_config.dtype": "float32",
            f"+{reference}.fsdp_config.mixed_precision": FLOAT32,
        }
    return [f"{name}={value}" for name, value in given.items()]


def _model_settings(
    options: argparse.Namespace, shape: Shape, *, model: str, trained: str, engine: str
) -> dict[str, object]:
    """The settings of a model that is trained, below the keys of its model, itself, and its engine."""
    return {
        f"{model}.path": options.model,
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.use_remove_padding": False,  # no sequence is padded, and packing needs flash attention
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{trained}.strategy": "fsdp2",  # the default, FSDP1, refuses weights on a CPU
        f"{trained}.ppo_micro_batch_size_per_gpu": shape.sequences,
        f"{trained}.optim.lr": 1e-5,
        f"{engine}.dtype": "float32",
        f"+{engine}.mixed_precision": FLOAT32,
    }


def compute_score(data_source: str, solution_str: str, ground_truth: str, **rest: object) -> float:
    """The workload's reward with the signature of verl's reward functions."""
    return digit_fraction([""], [solution_str])[0]


def timed_runner(times: Path, root: int) -> type:
    """verl's task runner, which is an actor, with a trainer that writes to `times` when its steps began and ended.

    `root` is the process that all others descend from.
    """
    import ray
    from verl.trainer.main_ppo_v0 import TaskRunner

    class TimedRunner(TaskRunner.__ray_metadata__.modified_class):
        def run(self, config: object) -> None:
            from clock import Marks, seconds_of_all
            from verl.trainer.ppo.ray_trainer import RayPPOTrainer

            marks = Marks(functools.partial(seconds_of_all, root))
            fit, begin = RayPPOTrainer.fit, RayPPOTrainer._start_profiling

            def timed_fit(trainer: RayPPOTrainer) -> None:
                fit(trainer)
                marks.add()  # the last step has ended
                times.write_text(json.dumps(marks.measured()))

            def timed_begin(trainer: RayPPOTrainer, *args: object) -> None:
                marks.add()
                begin(trainer, *args)

            RayPPOTrainer.fit, RayPPOTrainer._start_profiling = timed_fit, timed_begin
            super().run(config)

    return ray.remote(TimedRunner)


if __name__ == "__main__":
    main()
