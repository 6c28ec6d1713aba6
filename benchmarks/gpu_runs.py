"""Sections of the GPU benchmark that run whole trainings, each in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_case import LARGE, SMALL, Case, Row
from step_work import forward_flops
from workload import SHAPES, SIZES, ModelSize, build_workload

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 240.0


def built_in_task(case: Case) -> list[Row]:
    """PPO and GRPO on the built-in task: exact match before and after, and seconds per step."""
    rows = []
    for algorithm in ("ppo", "grpo"):
        steps = 1 if case.is_tiny else 60
        settings = [f"algorithm={algorithm}", f"trainer.total_steps={steps}", f"trainer.eval_every={steps}"]
        settings += ["data.batch_size=8", "data.eval_limit=8"] if case.is_tiny else []
        found = _train(case, f"learning_{algorithm}", settings)
        match = [row["val-core/calculator/acc/mean@1"] for row in found if "val-core/calculator/acc/mean@1" in row]
        seconds = sorted(row["timing_s/step"] for row in found if "timing_s/step" in row)
        difference = max(row.get("training/rollout_probs_diff_max", 0.0) for row in found)
        rows += [
            Row(f"{algorithm}: exact match at first", match[0]),
            Row(f"{algorithm}: exact match after {steps} steps", match[-1]),
            Row(f"{algorithm}: seconds per step", seconds[len(seconds) // 2], "s"),
            Row(f"{algorithm}: largest difference of rollout and training probabilities", difference),
        ]
    return rows


def long_prompts_beside_trl(case: Case) -> list[Row]:
    """GRPO steps of workload P with 0.55 B parameters, ours and TRL's."""
    return _beside_trl(case, "P", "large", SIZES["tiny"] if case.is_tiny else LARGE)


def short_prompts_beside_trl(case: Case) -> list[Row]:
    """GRPO steps of workload W with a small model, ours and TRL's."""
    return _beside_trl(case, "W", "small", SIZES["tiny"] if case.is_tiny else SMALL)


def _beside_trl(case: Case, name: str, model_name: str, size: ModelSize) -> list[Row]:
    """Seconds per step of a workload, in bfloat16 on GPUs, the ratio, and our phases' shares of the card's peak.

    Operations count every sequence on its own, so that a prompt computed once for its group raises the share.
    """
    texts = build_workload(case.scratch / "workload").rows[name]
    model = case.model_directory(model_name, size)
    shape, steps = SHAPES[name], 2 if case.is_tiny else 6
    settings = [
        "algorithm=grpo", f"model.path={model}", f"data.train_files=[{texts}]", "data.eval_files=[]",
        f"data.batch_size={shape.prompts}", f"data.max_prompt_tokens={shape.prompt_tokens}",
        f"data.max_response_tokens={shape.response_tokens}", f"rollout.samples_per_prompt={shape.samples}",
        f"rollout.max_sequences={shape.sequences}", "rollout.sampling.ignore_eos=true",
        f"reward.functions=[{HERE / 'workload.py'}:digit_fraction]", "actor.minibatch_size=null",
        f"actor.microbatch_tokens={shape.sequences * (shape.prompt_tokens + shape.response_tokens)}",
        "actor.optimizer.learning_rate=1e-5", "actor.gradient_checkpointing=false", f"trainer.total_steps={steps}",
        "trainer.eval_every=0",
    ]  # fmt: skip
    found = _train(case, f"beside_{name}", settings)
    ours = _median([row["timing_s/step"] for row in found if "timing_s/step" in row])
    rows = [Row(f"{name}: hybridflow GRPO, transformers", ours, "s/step")]
    forward = shape.sequences * forward_flops(size, shape.prompt_tokens, shape.response_tokens, has_logits=True)
    for phase, flops in (("gen", forward), ("update_actor", 3 * forward)):
        seconds = _median([row[f"timing_s/{phase}"] for row in found if f"timing_s/{phase}" in row])
        rows.append(Row(f"{name}: {phase} of it", seconds, "s/step"))
        if case.peak_flops is not None:
            rows.append(Row(f"{name}: {phase}, share of the card's peak", 100 * flops / seconds / case.peak_flops, "%"))
    if find_spec("trl") is None:
        return rows
    command = [sys.executable, "-W", "ignore", str(HERE / "peers" / "trl_grpo.py"), "--model", str(model)]
    command += ["--rows", str(texts), "--workload", name, "--steps", str(steps), "--device", case.device.type]
    theirs = _median(json.loads(_output(command).splitlines()[-1])["seconds"])
    rows += [
        Row(f"{name}: TRL GRPO, transformers", theirs, "s/step"),
        Row(f"{name}: TRL's seconds over ours", theirs / ours, "times"),
    ]
    return rows


def gsm8k(case: Case) -> list[Row]:
    """Some steps of the GSM8K recipe with a chat model, where both are given."""
    if case.model is None or case.gsm8k is None:
        return [Row("not run: --model and --gsm8k are not given", 0.0)]
    run = case.scratch / "gsm8k"
    recipe = HERE.parent / "recipes" / "grpo_gsm8k.py"
    settings = [f"trainer.run_dir={run}", *_common(case), "trainer.total_steps=6", "trainer.eval_every=0"]
    small = ["--cpu", "data.batch_size=2", "trainer.total_steps=1"] if case.is_tiny else ["data.batch_size=32"]
    _output([sys.executable, str(recipe), str(case.model), str(case.gsm8k), *settings, *small])
    found = _rows(run)
    names = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "perf/throughput", "critic/score/mean")
    return [Row(name, _median([row[name] for row in found if name in row])) for name in names if name in found[-1]]


def _train(case: Case, name: str, settings: list[str]) -> list[dict[str, float]]:
    """The metrics of each step of a run of main_ppo."""
    run = case.scratch / name
    _output([sys.executable, "-m", "hybridflow.trainer.main_ppo", f"trainer.run_dir={run}", *_common(case), *settings])
    return _rows(run)


def _common(case: Case) -> list[str]:
    return [
        f"trainer.device={case.device.type}", "trainer.backend=local", "trainer.save_every=0",
        "trainer.samples_every=0", "trainer.trackers=[jsonl]", "rollout.engine=transformers",
    ]  # fmt: skip


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _median(values: list[float]) -> float:
    """The median without the first value, which is a warm-up, if there are several."""
    kept = sorted(values[1:] or values)
    return kept[len(kept) // 2]


def _output(command: list[str]) -> str:
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, cwd=HERE.parent
    )
    if done.returncode:
        raise RuntimeError(
            f"exit status {done.returncode} of {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout
