"""Three steps of PPO's policy loss: the engine against a plain loop over rows with torch's own AdamW.

The gradient does not depend on how rows are divided into microbatches, and is that of the whole batch.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.workers.objectives import Denominators, policy_objective
from tests.oracles import training as oracle
from tests.parity.divided import OPTIMIZER
from tests.toys import logprobs_of, numbers_like, sequences, stepped
from tests.unit.engines.training.engines import language_engine, largest_difference, weights

TOLERANCE = 2e-5
"""float32 sums in another order, through three steps of rate 0.01; a lost row or token moves weights by 1e-3."""

ALGORITHM = Algorithm(clip_low=0.2, clip_high=0.3, entropy_coefficient=0.05)


def batches(directory) -> list[Batch]:
    """Three batches with advantages, and old log-probabilities near those of the model before it is trained."""
    model, made = language_engine(directory), []
    for seed in range(3):
        batch = sequences(seed=seed)
        old = logprobs_of(model, batch)
        near = old.like(old.values + numbers_like(old, seed=seed, scale=0.2).values)
        advantages = numbers_like(old, seed=seed + 10)
        made.append(batch.with_columns(tokens={"old_logprobs": near, "advantages": advantages}))
    return made


def trained(directory, microbatch_tokens: int):
    engine = language_engine(directory, optimizer=OPTIMIZER, microbatch_tokens=microbatch_tokens)
    metrics = [
        stepped(engine, batch, policy_objective(ALGORITHM, Denominators.of(batch), norm_tokens=16))
        for batch in batches(directory)
    ]
    return weights(engine), [step["grad_norm"].value for step in metrics]


def loop(directory) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same with one row at a time, and one token at a time in the loss."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    steps = [oracle.rows_of(batch) for batch in batches(directory)]
    counts = iter([sum(float(row["response_mask"].sum()) for row in rows) for rows in steps for _ in rows])

    def loss_of_row(model, row):
        logprobs, entropies = oracle.response_logprobs(model, row, 0.7)
        losses = []
        for r, counted in enumerate(row["response_mask"].tolist()):
            if counted:
                ratio, advantage = (logprobs[r] - row["old_logprobs"][r]).exp(), row["advantages"][r]
                bounded = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
                objective = torch.minimum(ratio * advantage, bounded * advantage)
                losses.append(-objective - ALGORITHM.entropy_coefficient * entropies[r])
        return torch.stack(losses).sum() / next(counts)

    norms = oracle.train(model, steps, loss_of_row, OPTIMIZER)
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_three_steps_equal_the_obvious_loop(toy_dir, architecture):
    directory = toy_dir(architecture)
    (found, norms), (expected, expected_norms) = trained(directory, 4096), loop(directory)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert min(norms) > 0.1
    assert largest_difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("microbatch_tokens", [1, 12, 40])
def test_the_weights_do_not_depend_on_micro_batches(toy_dir, microbatch_tokens):
    whole, norms = trained(toy_dir(), 4096)
    parts, norms_of_parts = trained(toy_dir(), microbatch_tokens)
    assert norms_of_parts == pytest.approx(norms, rel=1e-4)
    assert largest_difference(parts, whole) < TOLERANCE


def test_the_tolerance_would_show_a_lost_token(toy_dir):
    whole, _ = trained(toy_dir(), 4096)
    engine = language_engine(toy_dir(), optimizer=OPTIMIZER)
    for batch in batches(toy_dir()):
        mask = batch.tokens("response_mask")
        one_less = mask.like(mask.values.clone().index_fill_(0, torch.tensor([0]), 0.0))
        batch = batch.with_columns(tokens={"response_mask": one_less})
        stepped(engine, batch, policy_objective(ALGORITHM, Denominators.of(batch), norm_tokens=16))
    assert largest_difference(weights(engine), whole) > 10 * TOLERANCE
    assert math.isfinite(largest_difference(weights(engine), whole))
