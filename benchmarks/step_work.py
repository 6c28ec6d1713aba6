"""The operations of matrix products in a step of a workload, by which step.py relates seconds to the machine's rate.

Every sequence counts on its own, as is usual: its prompt once per response, and no padding. A backward pass is two
forward passes. A system that computes the prompt of a group once, or that neither pads nor recomputes, may therefore
reach a higher share than its products do.
"""

import json
from functools import cache
from pathlib import Path

from workload import SHAPES, SIZES, ModelSize, Workload

FORWARDS = {"grpo": 4, "ppo": 9, "dpo": 4, "sft": 3, "reward_model": 3}
"""Forward passes, as many as the operations of a step: GRPO generates (1) and updates (3); PPO also evaluates reference
and values (2), and updates the critic (3); DPO evaluates the reference (1) and updates (3)."""


def step_flops(workload: Workload, shape: str, algorithm: str, size: str, *, recomputes: bool) -> float:
    """Operations of a step on average; `recomputes`: old log-probabilities take a forward pass of their own."""
    forward = sum(
        count * forward_flops(SIZES[size], prompt, response, has_logits=algorithm != "reward_model")
        for prompt, response, count in lengths(workload, shape, algorithm)
    )
    return forward * (FORWARDS[algorithm] + (recomputes and algorithm in ("grpo", "ppo")))


def lengths(workload: Workload, shape: str, algorithm: str) -> list[tuple[int, int, float]]:
    """Tokens of prompt and response, and how many sequences of a step have them on average."""
    step = SHAPES[shape]
    if not step.is_long_tailed:
        return [(step.prompt_tokens, step.response_tokens, step.sequences)]
    stored = _stored_rows(workload.rows_for(shape, algorithm))
    if algorithm == "grpo":
        return [(len(row["prompt"]), step.response_tokens, step.sequences / len(stored)) for row in stored]
    names = ("chosen", "rejected", "completion")
    found = [(len(row["prompt"]), len(row[name]) + 1) for row in stored for name in names if name in row]
    rows = len(found) if algorithm == "sft" else len(found) / 2
    return [(prompt, response, step.prompts / rows) for prompt, response in found]


@cache
def _stored_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def forward_flops(size: ModelSize, prompt: int, response: int, *, has_logits: bool) -> float:
    """Operations of one forward pass of a sequence: layers, causal attention, and logits of the response."""
    tokens, width = prompt + response, size.heads * size.head_size
    projections = size.hidden * size.head_size * 2 * (size.heads + size.kv_heads) + 3 * size.hidden * size.intermediate
    layers = size.layers * (2 * tokens * projections + 2 * tokens**2 * width)
    return layers + (2 * response * size.hidden * size.vocabulary if has_logits else 0)
