"""Grouped experts: the products and gradients of experts one by one, wherever their weights lie."""

import logging
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.megatron import architecture, experts
from hybridflow.engines.training.megatron import engine as megatron
from hybridflow.engines.training.megatron.experts import matrices
from tests.parity.divided import Case, copies, engine_of, global_batch, loss_of, mesh_of, own_rows
from tests.spmd import preload, run_ranks
from tests.toys import stepped

preload("hybridflow.engines.training.megatron.engine")

EXPERTS, ROWS, COLUMNS = 3, 8, 12
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def memory(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def together() -> list[nn.Parameter]:
    """Gate and up of each expert, all one below the other."""
    return [nn.Parameter(part) for part in memory(2 * EXPERTS * ROWS, COLUMNS).split(ROWS)]


def in_wider_tensors() -> list[nn.Parameter]:
    """The upper half of larger gates and ups, and some columns of them."""
    whole = memory(EXPERTS, 2, 2 * ROWS, COLUMNS + 8)
    for (expert, part), weight in zip(((e, p) for e in range(EXPERTS) for p in range(2)), together(), strict=True):
        whole[expert, part, :ROWS, 4:-4] = weight.detach()
    return [nn.Parameter(whole[expert, part, :ROWS, 4:-4]) for expert in range(EXPERTS) for part in range(2)]


def out_of_order() -> list[nn.Parameter]:
    copied = torch.cat([part.detach() for part in reversed(together())])
    return [nn.Parameter(part) for part in reversed(copied.split(ROWS))]


@pytest.mark.parametrize(("weights", "count"), [(together, 1), (in_wider_tensors, 2)])
@pytest.mark.parametrize("per_expert", [(4, 0, 5), (0, 0, 3), (0, 0, 0)])
def test_products_and_gradients_are_those_of_experts_one_by_one(weights, count, per_expert):
    parts = weights()
    lying = matrices(parts, EXPERTS)
    assert lying is not None and len(lying) == count
    tokens = memory(sum(per_expert), COLUMNS).requires_grad_()
    slope = torch.randn(sum(per_expert), 2 * ROWS, generator=torch.Generator().manual_seed(2))
    ends = torch.tensor(per_expert).cumsum(0, dtype=torch.int32)
    out = experts._product(tokens, ends, lying, parts)
    found = torch.autograd.grad(out, [tokens, *parts], slope)
    copies = [part.detach().clone().requires_grad_() for part in parts]
    alone = tokens.detach().requires_grad_()
    rows = alone.split(per_expert)
    expected = torch.cat([F.linear(own, torch.cat(copies[2 * e : 2 * e + 2])) for e, own in enumerate(rows)])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [alone, *copies], slope))


def test_no_grouped_product_reads_weights_out_of_order_or_rows_at_odd_addresses():
    assert matrices(out_of_order(), EXPERTS) is None
    assert matrices([*memory(2 * EXPERTS * ROWS, COLUMNS + 1).split(ROWS)], EXPERTS) is None
    assert matrices([*memory(2 * EXPERTS * ROWS, COLUMNS + 1)[:, 1:].split(ROWS)], EXPERTS) is None


def trained(rank: int, case: Case, fused: bool) -> bytes:
    """Two steps' norms and weights, and how many grouped products they took."""
    torch._dynamo.config.disable = True  # what `torch.compile` makes of SwiGLU computes as the function it is made of
    make = megatron.transformer_config
    megatron.transformer_config = lambda *models, **options: make(*models, **{**options, "fused_activation": fused})
    engine, mesh = engine_of(case, rank), mesh_of(case)
    norms, calls, product = [], [], F.grouped_mm
    F.grouped_mm = lambda *operands, **options: calls.append(1) or product(*operands, **options)
    for step in range(2):
        batch = global_batch(step, case.kind)
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        norms.append(stepped(engine, rows, loss_of(batch, case.kind))["grad_norm"].value)
    weights = {(shard.name, shard.layout.box): shard.tensor for shard in copies(engine)}
    assert isinstance(engine, megatron.MegatronEngine) and engine._config.bias_activation_fusion is fused
    return pickle.dumps((norms, weights, len(calls)))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3"])
def test_training_with_a_fused_activation_is_that_with_a_plain_one(toy_dir, architecture):
    """That grouped experts train as experts one by one do is in tests/parity/test_engines.py."""
    case = Case(toy_dir(architecture, **HEADS), 2, TrainingEngine.megatron, {"tensor": 2})
    found, plain = ([*map(pickle.loads, run_ranks(trained, 2, case, fused))] for fused in (True, False))
    for (norms, weights, calls), (plain_norms, plain_weights, _) in zip(found, plain, strict=True):
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        assert weights.keys() == plain_weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain_weights[name], rtol=0, atol=1e-6, msg=str(name))
        assert (calls > 0) == (architecture == "qwen3_moe")


def compiled_without_a_compiler(rank: int) -> tuple[bool, str]:
    """Whether SwiGLU can be compiled where the compiler is not there, and what is logged."""
    inductor.cpp.cxx = (None, "/absent/compiler")
    inductor.force_disable_caches = True
    records: list[logging.LogRecord] = []
    architecture.logger.addFilter(lambda record: records.append(record) is not None)
    return architecture.can_compile_activation(torch.device("cpu")), " ".join(each.getMessage() for each in records)


def test_without_a_compiler_the_activation_is_not_fused_and_the_log_says_why():
    ((can, words),) = run_ranks(compiled_without_a_compiler, 1)
    assert not can
    assert "SwiGLU in separate kernels" in words and "/absent/compiler" in words
