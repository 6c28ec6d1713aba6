"""Five steps of AdamW on Megatron-Core, by matrix, by layer, by expert and by row, against one device.

The plain engine is held to a loop over rows elsewhere; here losses, gradient norms, outputs and weights of every
layout must be its own, whoever has how many rows, in however many micro-batches.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.training import TrainingEngine
from tests.parity.divided import Case, Trained, largest_differences, train
from tests.spmd import preload

preload("hybridflow.engines.training.megatron.engine")

TOLERANCE = {"numbers": 5e-5, "outputs": 5e-5, "weights": 2e-6}
"""float32 sums in another order, through five steps; a lost row or token moves a weight by 1e-3."""

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}

TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
TURNS = {"pipeline": 2, "virtual_pipeline": 2}
BOTH = {"tensor": 2, "pipeline": 2}
WHOLE_STATE = {"distributed_optimizer": False}
EXPERT = {"expert": 2}

FAST = [
    ("llama", "language", 2, TENSOR),
    ("qwen2", "language", 2, SEQUENCE),
    ("qwen3", "language", 2, PIPELINE),
    ("llama", "language", 2, TURNS),
    ("qwen2", "language", 2, {}),
    ("llama", "language", 2, WHOLE_STATE),
    ("qwen3", "language", 4, BOTH),
    ("qwen3_moe", "language", 2, EXPERT),
    ("qwen3", "value", 2, SEQUENCE),
]


@pytest.fixture(scope="module")
def plain(toy_dir):
    """A function: case -> the same on one device, trained once."""
    made: dict[str, Trained] = {}

    def of(case: Case) -> Trained:
        key = str((case.directory, case.kind, case.dtype, case.steps))
        if key not in made:
            settings = {name: value for name, value in case.settings.items() if name == "optimizer"}
            made[key] = train(replace(case, ranks=1, engine=TrainingEngine.single, sizes={}, settings=settings))
        return made[key]

    return of


def directory_of(toy_dir, architecture: str) -> Path:
    return toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)


def divided(toy_dir, architecture: str, kind: str, ranks: int, sizes: dict[str, int], **settings: object) -> Case:
    return Case(directory_of(toy_dir, architecture), ranks, TrainingEngine.megatron, sizes, kind, settings=settings)


def assert_equal(found: Trained, expected: Trained, tolerance: dict[str, float] = TOLERANCE) -> None:
    differences = largest_differences(found, expected)
    assert all(differences[what] < limit for what, limit in tolerance.items()), differences


@pytest.mark.parametrize(("architecture", "kind", "ranks", "sizes"), FAST)
def test_five_steps_equal_those_of_one_device(toy_dir, plain, architecture, kind, ranks, sizes):
    case = divided(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case))
