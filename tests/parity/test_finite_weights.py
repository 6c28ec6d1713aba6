"""No engine saves a weight that is not finite, whichever rank holds it."""

import pytest

from hybridflow.config.training import TrainingEngine
from tests.parity.divided import Case
from tests.parity.poisoned import save_of_a_poisoned_rank
from tests.spmd import run_ranks

FSDP, SINGLE = TrainingEngine.fsdp, TrainingEngine.single


@pytest.mark.parametrize(
    ("engine", "ranks", "sizes", "kind", "number"),
    [
        (SINGLE, 1, {}, "language", float("nan")),
        (SINGLE, 1, {}, "value", float("inf")),
        (FSDP, 2, {}, "language", float("-inf")),
        pytest.param(TrainingEngine.megatron, 2, {"pipeline": 2}, "language", float("nan"), marks=pytest.mark.megatron),
    ],
)
def test_a_weight_that_is_not_finite_is_not_saved_by_any_rank(toy_dir, tmp_path, engine, ranks, sizes, kind, number):
    case = Case(toy_dir("qwen3", num_attention_heads=4, num_key_value_heads=2), ranks, engine, sizes, kind)
    for said in run_ranks(save_of_a_poisoned_rank, ranks, case, number, tmp_path):
        assert "became NaN or infinite in training: nothing was saved at this step" in said
        assert "Lower the role's optimizer.learning_rate" in said and "resumes from the last one" in said
    assert list(tmp_path.iterdir()) == []
