"""Training and generation on one memory: what docs/how_to/one_set_of_weights.md says of each pair of engines."""

import re
from pathlib import Path

import pytest

from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.config.rollout import Rollout, RolloutKind
from hybridflow.config.training import Optimizer, Training, TrainingEngine
from tests.distributed.in_place import Memory, memory_of_weights
from tests.spmd import preload, run_ranks

preload("tests.vllm_preload", "hybridflow.engines.training.megatron.engine")
pytestmark = [pytest.mark.vllm, pytest.mark.megatron]

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "one_set_of_weights.md"
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


def training(engine: str, **sizes: int) -> Training:
    """A trained model in some layout."""
    optimizer = Optimizer(learning_rate=0.01, epsilon=1e-3)
    return Training(engine=TrainingEngine[engine], parallelism=Parallelism(**sizes), optimizer=optimizer)


def rollout(kind: str, tensor: int = 1) -> Rollout:
    """A rollout in some layout."""
    return Rollout(engine=RolloutKind[kind], parallelism=RolloutParallelism(tensor=tensor))


PAIRS = {
    "single -> transformers": (training("single"), rollout("transformers"), 1),
    "single -> vllm": (training("single"), rollout("vllm"), 1),
    "fsdp 2 -> transformers": (training("fsdp"), rollout("transformers"), 2),
    "fsdp 2 -> vllm": (training("fsdp"), rollout("vllm"), 2),
    "fsdp 2 -> vllm t2": (training("fsdp"), rollout("vllm", 2), 2),
    "fsdp 4 -> vllm t2": (training("fsdp"), rollout("vllm", 2), 4),
    "fsdp t2 -> vllm t2": (training("fsdp", tensor=2), rollout("vllm", 2), 2),
    "megatron t2 -> vllm t2": (training("megatron", tensor=2), rollout("vllm", 2), 2),
    "megatron t2 -> vllm": (training("megatron", tensor=2), rollout("vllm"), 2),
    "megatron p2 -> vllm": (training("megatron", pipeline=2), rollout("vllm"), 2),
    "megatron p2 t2 -> vllm t2": (training("megatron", pipeline=2, tensor=2), rollout("vllm", 2), 4),
    "megatron d2 -> vllm": (training("megatron"), rollout("vllm"), 2),
}
FAST = ["single -> transformers", "single -> vllm", "fsdp 2 -> vllm", "megatron t2 -> vllm t2"]
CASES = [pytest.param(pair, marks=[] if pair in FAST else pytest.mark.slow) for pair in PAIRS]


def documented() -> dict[str, tuple[int, int, int]]:
    """Per pair: percent of what a rank generates with that is shared, copied within the rank, and received."""
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return {pair: (int(shared), int(copied), int(received)) for pair, shared, copied, received in rows}


def test_every_pair_of_the_table_is_measured():
    assert set(documented()) == set(PAIRS)


@pytest.mark.parametrize("pair", CASES)
def test_as_much_is_shared_copied_and_received_as_the_table_says(toy_dir, pair):
    trained, generating, num_ranks = PAIRS[pair]
    directory = toy_dir("llama", **SIZES)
    ranks: list[Memory] = run_ranks(memory_of_weights, num_ranks, directory, trained, generating, num_ranks)
    wanted = sum(memory.wanted for memory in ranks)
    first = ranks[0]
    percent = tuple(round(100 * part / wanted) for part in (first.aliased, first.copied, first.moved))
    assert percent == documented()[pair]
    for memory in ranks:
        assert memory.aliased == sum(other.shared for other in ranks)  # what was not moved is one memory, by address
        assert 0.9 * memory.shared < memory.seen <= memory.shared  # a step is seen there at once, and nowhere else
