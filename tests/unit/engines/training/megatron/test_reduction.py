"""Gradients summed in buckets during the backward pass give the numbers of sums after it."""

import pickle
from collections import Counter

import pytest

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.megatron import optimizer
from hybridflow.engines.training.megatron.engine import MegatronEngine
from tests.parity.divided import Case, copies, engine_of, global_batch, loss_of, mesh_of, own_rows
from tests.spmd import preload, run_ranks
from tests.toys import logprobs_of, stepped

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


def trained(rank: int, case: Case, overlapped: bool) -> bytes:
    """Three steps with unequal numbers of rows and microbatches, a pass without gradient before each: weights, norms,
    the number of buckets that a rank sums, and how many sums of each step began before the backward pass had ended."""
    optimizer.BUCKET_ELEMENTS = 2000
    if not overlapped:
        plain = optimizer.reduction_config
        optimizer.reduction_config = lambda divided, replicas: plain(divided=divided, replicas=1)
    engine = engine_of(case, rank)
    assert isinstance(engine, MegatronEngine)
    mesh, norms, early = mesh_of(case), [], Counter()
    buckets = sum(
        len(module.bucket_groups) + len(module.expert_parallel_bucket_groups) for module in engine.optimizer.modules
    )
    wrapper = type(engine.optimizer.modules[0])
    finish = wrapper.finish_grad_sync
    step = 0

    def watched(self, force_all_reduce: bool | None = False) -> None:
        own = [*self.bucket_groups, *self.expert_parallel_bucket_groups]
        early[step] += sum(group.grad_reduce_handle is not None for group in own)
        finish(self, force_all_reduce)

    wrapper.finish_grad_sync = watched
    for step in range(3):
        batch = global_batch(step, case.kind)
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        if step == 2 and mesh.index_along(rank, ("data",)):
            rows = rows.slice(0, 0)
        logprobs_of(engine, rows)
        norms.append(stepped(engine, rows, loss_of(batch, case.kind))["grad_norm"].value)
    weights = {(shard.name, shard.layout.box): shard.tensor for shard in copies(engine)}
    return pickle.dumps((weights, norms, buckets, early))


@pytest.mark.parametrize(
    ("architecture", "ranks", "sizes", "settings"),
    [
        ("qwen3", 2, {}, {}),
        ("llama", 2, {"distributed_optimizer": False}, {"gradient_checkpointing": True}),
        pytest.param("llama", 4, {"pipeline": 2, "virtual_pipeline": 2}, {}, marks=pytest.mark.slow),
        ("qwen3_moe", 4, {"expert": 2}, {}),
    ],
)
def test_sums_under_way_during_the_backward_pass_give_the_same_numbers(toy_dir, architecture, ranks, sizes, settings):
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS)
    case = Case(directory, ranks, TrainingEngine.megatron, sizes, settings={"microbatch_tokens": 12, **settings})
    found, expected = ([pickle.loads(each) for each in run_ranks(trained, ranks, case, on)] for on in (True, False))
    for (weights, norms, buckets, early), (plain_weights, plain_norms, _, late) in zip(found, expected, strict=True):
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        assert weights.keys() == plain_weights.keys()
        for name, weight in weights.items():
            assert float((weight - plain_weights[name]).abs().max()) <= 1e-6, name
        assert not any(late.values()), "summed after the pass"
        assert early[1] == early[2] == buckets, "every bucket was under way"
    assert found[0][2] > 3


def test_one_data_parallel_rank_sums_nothing_and_makes_no_buckets(toy_dir):
    case = Case(toy_dir("llama", **HEADS), 2, TrainingEngine.megatron, {"tensor": 2})
    for answer in run_ranks(trained, 2, case, True):
        *_, buckets, early = pickle.loads(answer)
        assert buckets == 1 and not any(early.values())
