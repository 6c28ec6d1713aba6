"""The smallest run of each trainer: one step on the built-in model, or on another, in the current directory."""

import json
from pathlib import Path

import transformers.models.llama.modeling_llama

import hybridflow.engines.rollout.transformers.engine
import hybridflow.engines.training.single
import hybridflow.launch.execute
import hybridflow.launch.messages
from hybridflow.trainer import main_dpo, main_kto, main_ppo, main_reward_model, main_sft

IMPORTED = (
    hybridflow.engines.rollout.transformers.engine,
    hybridflow.engines.training.single,
    hybridflow.launch.execute,
    hybridflow.launch.messages,
    transformers.models.llama.modeling_llama,
)
"""What a run imports late, so that forked cases need not."""

MAINS = {
    "ppo": main_ppo.main,
    "sft": main_sft.main,
    "dpo": main_dpo.main,
    "kto": main_kto.main,
    "reward_model": main_reward_model.main,
}
_WORDS = [
    "trainer={total_steps: 1, save_every: 1, eval_every: 0, samples_every: 1, threads: 1, device: cpu}",
    "trainer={backend: local, run_dir: run, trackers: [console]}",
    "data={batch_size: 2, max_prompt_tokens: 64, max_response_tokens: 16}",
    "actor={minibatch_size: null}",
]
_OF_PPO = [
    "algorithm=grpo",
    "rollout.samples_per_prompt=2",
    "reward.functions=[exact_match]",
    "algorithm.kl.placement=loss",
]
_ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(10, 14)]


def run(
    trainer: str, *, data: str = "data.jsonl", model: str = "builtin:calculator", more: tuple[str, ...] = ()
) -> int:
    """The exit status of a run of one step."""
    words = [*_WORDS, f"model.path={model}", f"data.train_files=[{json.dumps(data)}]"]
    return MAINS[trainer]([*words, *(_OF_PPO if trainer == "ppo" else []), *more])


def write_rows(path: Path, rows: list | None = None) -> None:
    """Rows as JSON lines; sums for the built-in model where there are none."""
    path.write_text("".join(json.dumps(row) + "\n" for row in (_ROWS if rows is None else rows)))
