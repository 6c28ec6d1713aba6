"""Adapters trained in shards, with copies of shards, by matrix and by token, against one device.

Losses, gradient norms, outputs and the merged weights that a rollout gets must be the plain engine's in every layout.
"""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora, TrainingEngine
from hybridflow.engines.training.interface import TrainEngine
from tests.parity.divided import Case, assert_equal, engine_of, global_batch, loss_of, mesh_of, own_rows, train
from tests.spmd import run_ranks
from tests.toys import logprobs_of, stepped

TOLERANCE = {"numbers": 5e-5, "outputs": 5e-5, "weights": 5e-6}
"""float32 sums in another order, through five steps, in a product of two matrices that both moved."""

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LORA = Lora(rank=3, alpha=6.0)
"""A rank that two shards do not divide evenly, and of which four ranks leave one without a row."""

FAST = [("llama", "language", 2, {}), ("qwen3", "language", 2, {"tensor": 2}), ("qwen2", "value", 2, {})]
SLOW = [
    ("qwen3_moe", "language", 2, {}),
    *(
        (architecture, "language", ranks, sizes)
        for architecture in ("llama", "qwen3")
        for ranks, sizes in [
            (1, {}),
            (3, {}),
            (4, {}),
            (4, {"replicas": 2}),
            (2, {"sequence": 2}),
            (4, {"tensor": 2}),
            (4, {"tensor": 2, "sequence": 2}),
        ]
    ),
]


def directory_of(toy_dir, architecture: str) -> Path:
    return toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)


def sharded(toy_dir, architecture: str, kind: str, ranks: int, sizes: dict[str, int], lora: Lora = LORA) -> Case:
    directory = directory_of(toy_dir, architecture)
    return Case(directory, ranks, TrainingEngine.fsdp, sizes, kind, settings={"lora": lora})


@pytest.mark.parametrize(
    ("architecture", "kind", "ranks", "sizes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_an_adapter_in_shards_learns_what_one_device_does(toy_dir, plain, architecture, kind, ranks, sizes):
    case = sharded(toy_dir, architecture, kind, ranks, sizes)
    assert_equal(train(case), plain(case), TOLERANCE)


def test_some_matrices_may_be_adapted_and_others_not(toy_dir, plain):
    lora = Lora(rank=2, targets=["q_proj", "down_proj"])
    case = sharded(toy_dir, "llama", "language", 2, {"tensor": 2}, lora)
    assert_equal(train(case), plain(case), TOLERANCE)


def step_of(engine: TrainEngine, case: Case, rank: int, seed: int) -> None:
    """One optimizer step of a rank on its rows of a batch."""
    mesh, batch = mesh_of(case), global_batch(seed, "language")
    rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
    stepped(engine, rows, loss_of(batch, "language"))


def asked_trained_and_resumed(rank: int, case: Case, other: Case, folder: Path) -> bytes:
    """Log-probabilities without the adapter before and after two steps; then of what another layout reads of it."""
    engine, batch = engine_of(case, rank), global_batch(0, "language")

    def logprobs(engine, **options) -> torch.Tensor:
        return logprobs_of(engine, batch, **options).values

    found = {"before": logprobs(engine, adapted=False)}
    for step in range(2):
        step_of(engine, case, rank, step)
    found |= {"after": logprobs(engine, adapted=False), "learnt": logprobs(engine)}
    engine.save(folder)
    again = engine_of(other, rank)
    again.load(folder)
    found["resumed"] = logprobs(again)
    step_of(engine, case, rank, 2)
    step_of(again, other, rank, 2)
    return pickle.dumps(found | {"went on": logprobs(engine), "resumed went on": logprobs(again)})


@pytest.mark.parametrize("dtype", [Dtype.float32, pytest.param(Dtype.bfloat16, marks=pytest.mark.slow)])
def test_without_the_adapter_it_is_the_base_model_and_a_checkpoint_fits_any_layout(toy_dir, tmp_path, dtype):
    case = replace(sharded(toy_dir, "qwen3", "language", 2, {"replicas": 2}), dtype=dtype)
    other = replace(case, sizes={"tensor": 2})
    base = replace(case, ranks=1, engine=TrainingEngine.single, sizes={}, settings={})
    expected = logprobs_of(engine_of(base), global_batch(0, "language")).values
    for answer in run_ranks(asked_trained_and_resumed, 2, case, other, tmp_path):
        found = pickle.loads(answer)
        # float32 sums in another order; bfloat16 products, summed over two ranks.
        near = 5e-5 if dtype is Dtype.float32 else 0.25
        assert torch.equal(found["before"], found["after"])
        assert (found["before"] - expected).abs().max() < near
        assert (found["learnt"] - found["after"]).abs().max() > 0.05
        assert (found["resumed"] - found["learnt"]).abs().max() < near
        assert (found["resumed went on"] - found["went on"]).abs().max() < near
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "optimizer"]
