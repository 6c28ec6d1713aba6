"""vLLM over ranks: whatever the layout, the answers of transformers and of one rank alone, and the right pieces."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from hybridflow.models.loading import load_causal_lm
from hybridflow.parallel.boxes import uncovered
from hybridflow.parallel.layout import TensorLayout
from hybridflow.parallel.mesh import ParallelMesh
from tests.oracles.training import response_logprobs
from tests.spmd import preload, run_ranks
from tests.unit.engines.rollout.rows import greedy_answers
from tests.vllm_ranks import (
    TOKENS,
    Seen,
    all_prompts,
    checkpoint_shards,
    each_model,
    own_part,
    own_rows,
    seen_by_vllm,
    visible_devices,
    weights_from_outside,
)

preload("tests.vllm_preload")
pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4
"""float32 sums in another order; a wrong head, expert or row moves log-probabilities by 1e-1."""

TWO = {"data": 1, "tensor": 2}
MODELS = {
    "llama": {"vocab_size": 70},  # one key-value head for two ranks; a vocabulary of which the second has little
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2},
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
CASES = [pytest.param(name, marks=pytest.mark.slow if name in ("qwen2", "qwen3") else []) for name in MODELS]


@pytest.fixture(scope="module")
def directories(toy_dir) -> dict[str, Path]:
    return {name: toy_dir(name, **changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def divided(directories) -> Callable[[str], list[Seen]]:
    """A function: model -> what its two tensor-parallel ranks saw."""

    @cache
    def seen(name: str) -> list[Seen]:
        return [rank[name] for rank in run_ranks(each_model, 2, {name: directories[name]}, TWO)]

    return seen


@pytest.fixture(scope="module")
def alone(directories) -> Seen:
    """The first model on one rank."""
    return run_ranks(each_model, 1, {"llama": directories["llama"]}, {"data": 1, "tensor": 1})[0]["llama"]


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_over_ranks_are_those_of_transformers(directories, divided, name):
    plain = load_causal_lm(directories[name], dtype=torch.float32, device="cpu")
    expected = greedy_answers(plain, all_prompts(), tokens=TOKENS)
    assert [rank.greedy for rank in divided(name)] == [expected, expected]
    prompts = all_prompts().tokens("prompt_ids").rows()
    for prompt, tokens, logprobs in zip(prompts, expected, divided(name)[0].logprobs, strict=True):
        row = {"prompt_ids": prompt, "response_ids": torch.tensor(tokens)}
        with torch.no_grad():
            exact = response_logprobs(plain, row, 1.0)[0]
        assert torch.allclose(torch.tensor(logprobs), exact, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_the_slots_of_all_ranks_are_the_checkpoint(directories, divided, name):
    whole = checkpoint_shards(directories[name])
    width = whole["model.layers.1.self_attn.o_proj.weight"].layout.shape[1] // 2
    assert [rank.wrong for rank in divided(name)] == [[], []]
    assert set().union(*(rank.boxes for rank in divided(name))) == set(whole)
    for weight, shard in whole.items():
        boxes = [rank.boxes[weight] for rank in divided(name) if weight in rank.boxes]
        assert not uncovered(TensorLayout.full(shard.layout.shape).box, boxes), weight
    projections = {rank.boxes["model.layers.1.self_attn.o_proj.weight"] for rank in divided(name)}
    assert projections == {((0, 64), (0, width)), ((0, 64), (width, 2 * width))}


@pytest.mark.parametrize(
    "axes",
    [pytest.param({"data": 2, "tensor": 1}, marks=pytest.mark.slow), {"data": 1, "tensor": 2, "micro_tensor": 2}],
    ids=str,
)
def test_samples_do_not_depend_on_the_layout_or_the_number_of_replicas(directories, divided, alone, axes):
    """Nor do replicas wait for one another, though they are strided: ranks 0 and 2, ranks 1 and 3."""
    num_ranks = ParallelMesh(axes).size
    parts = run_ranks(own_part, num_ranks, directories["llama"], axes)
    for rank, part in enumerate(parts):
        rows = own_rows(rank, axes)
        assert (
            part.sampled == [alone.sampled[row] for row in rows] == [divided("llama")[0].sampled[row] for row in rows]
        )
        assert part.greedy == [alone.greedy[row] for row in rows]
        assert part.wrong == []
    assert sorted(row for rank in {tuple(own_rows(r, axes)) for r in range(num_ranks)} for row in rank) == list(
        range(8)
    )
    assert len({tuple(answer) for answer in alone.sampled}) > 6


def test_rows_that_are_interrupted_on_all_ranks_of_a_replica_draw_the_same(divided):
    for rank in divided("llama"):
        assert rank.interrupted == rank.sampled


@pytest.fixture(scope="module")
def filled(directories) -> list[dict[str, dict]]:
    """A dense model and one with experts, each over two ranks, with weights from outside."""
    return run_ranks(weights_from_outside, 2, {name: directories[name] for name in ("llama", "qwen3_moe")}, TWO)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weights_written_from_outside_answer_and_nothing_else_does(divided, filled, name):
    for rank in filled:
        found = rank[name]
        assert "have not been written yet" in found["unwritten"]
        assert found["version 3"] == found["version 4"] == divided(name)[0].greedy
        assert "freed while it slept" in found["slept"]
        assert found["released"].weight_bytes > 0
        assert found["released"].cache_bytes > 0.99 * (16 << 20)  # whole pages


def test_ranks_of_a_replica_that_were_given_different_rows_say_so(filled):
    for rank in filled:
        assert "received different prompts" in rank["llama"]["different rows"]


def test_a_second_layout_in_one_process_is_refused(filled):
    for rank in filled:
        assert "rollout.parallelism" in rank["llama"]["another layout"]


def test_vllm_finds_the_gpus_of_a_replica_among_all_of_the_node(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(IndexError):  # what its all-reduce met with one visible GPU per rank
        seen_by_vllm(2)
    assert run_ranks(visible_devices, 4, {"data": 2, "tensor": 2}) == [
        ([0, 1], 0),
        ([0, 1], 1),
        ([2, 3], 0),
        ([2, 3], 1),
    ]


KILLED = """
import os, signal, sys
from pathlib import Path

from tests.vllm_ranks import engine_on

engine_on(0, Path(sys.argv[1]), {"data": 1, "tensor": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_leaves_no_temporary_file(directories, tmp_path: Path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, directories["llama"]],
        env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in temporary.rglob("*") if path.is_file()] == []
