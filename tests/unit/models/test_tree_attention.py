"""Attention over sequences that share prefixes, against each sequence with a prefix of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.models.heads import packed_hidden_states
from hybridflow.models.packed_attention import packed_attention, use_packed_attention
from hybridflow.models.packing import Packing
from hybridflow.models.tree_attention import operators, tree_attention
from tests.unit.models.test_packed_attention import CPU, MODELS, check_same, hidden_and_gradients, plain


@st.composite
def trees(draw) -> Packing:
    """Parts in depth-first order: each continues one of those from the last part up to its root, or none."""
    lengths, parents, path = list[int](), list[int](), list[int]()
    for part in range(draw(st.integers(1, 10))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        lengths.append(draw(st.sampled_from([0, 1, 3, 3, 7])))
        path.append(part)
    lengths[0] = max(1, lengths[0])
    return Packing(tuple(lengths), CPU, parents=tuple(parents))


def by_definition(query, key, value, packing: Packing, window: int = 1000):
    """Attention by its definition of each part with all that it continues; the rows of the part itself."""
    starts, rows, paths = packing.cu_seqlens.tolist(), [], []
    for part, parent in enumerate(packing.parents):
        own = torch.arange(starts[part], starts[part + 1])
        paths.append(torch.cat([paths[parent], own]) if parent >= 0 else own)
        if len(own):
            whole = plain(*(each[paths[part]] for each in (query, key, value)), [len(paths[part])], window)
            rows.append(whole[len(whole) - len(own) :])
    return torch.cat(rows)


def parts_of(packing: Packing, *, value_size: int = 8):
    generator = torch.Generator().manual_seed(packing.num_tokens)
    shapes = [(packing.num_tokens, heads, size) for heads, size in ((4, 8), (2, 8), (2, value_size))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def check_attention(found, expected, parts):
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each, parts, slope) for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(trees())
def test_parts_attend_to_themselves_and_to_all_that_they_continue(packing):
    parts = parts_of(packing)
    check_attention(tree_attention(*parts, packing, scaling=0.3), by_definition(*parts, packing), parts)


@settings(deadline=None, max_examples=20)
@given(trees())
def test_gradients_in_bfloat16_on_a_cpu_are_exact_up_to_rounding(packing):
    rounded = [part.detach().bfloat16().requires_grad_() for part in parts_of(packing)]
    exact = [part.detach().double().requires_grad_() for part in rounded]
    slope = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for bare in (packing, Packing(packing.lengths, CPU)):
        found = torch.autograd.grad(packed_attention(*rounded, bare), rounded, slope)
        expected = torch.autograd.grad(packed_attention(*exact, bare), exact, slope.double())
        for own, whole in zip(found, expected, strict=True):
            assert own.dtype is torch.bfloat16
            torch.testing.assert_close(own.double(), whole, rtol=0.01, atol=0.01 * float(whole.abs().max()) + 1e-3)


@settings(deadline=None, max_examples=20)
@given(trees(), st.sampled_from([(2, 8), (5, 8), (1000, 4)]))
def test_a_window_and_values_of_another_size_reach_into_what_a_part_continues(packing, case):
    window, value_size = case
    parts = parts_of(packing, value_size=value_size)
    found = packed_attention(*parts, packing, scaling=0.3, window=window)
    check_attention(found, by_definition(*parts, packing, window), parts)


@given(trees())
def test_positions_continue_and_sequences_can_be_written_out(packing):
    before = [0] * len(packing.lengths)
    for part, parent in enumerate(packing.parents):
        before[part] = before[parent] + packing.lengths[parent] if parent >= 0 else 0
    expected = [before[part] + i for part, length in enumerate(packing.lengths) for i in range(length)]
    assert packing.position_ids.tolist() == expected
    assert packing.max_seqlen == max(expected, default=-1) + 1
    whole, taken, back = packing.unshared
    assert torch.equal(packing.position_ids[taken], whole.position_ids)
    assert taken[back].tolist() == list(range(packing.num_tokens))


@given(trees())
def test_no_token_is_a_query_of_two_blocks_of_one_call(packing):
    for call in packing.calls:
        where = torch.arange(packing.num_tokens)[call.query_positions]
        real = where if call.is_real is None else where[call.is_real]
        assert len(real.unique()) == len(real)


TREE = Packing((4, 3, 2, 5, 6), CPU, parents=(-1, 0, 1, 1, 0))
PATHS = [[0, 1, 2], [0, 1, 3], [0, 4]]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_hidden_states_and_gradients_of_models_are_those_without_sharing(make):
    model = make()
    assert use_packed_attention(model)
    ids = torch.randint(2, 60, (TREE.num_tokens,), generator=torch.Generator().manual_seed(2))
    whole, taken, _ = TREE.unshared
    assert whole.lengths == tuple(sum(TREE.lengths[part] for part in path) for path in PATHS)
    shared = hidden_and_gradients(model, packed_hidden_states(model, ids, TREE)[taken])
    check_same(shared, hidden_and_gradients(model, packed_hidden_states(model, ids[taken], whole)))


def test_without_pytorchs_operators_each_sequence_is_attended_to(monkeypatch, caplog):
    parts = parts_of(TREE)
    shared = packed_attention(*parts, TREE, scaling=0.3)
    with monkeypatch.context() as patched:
        patched.setattr(torch.ops, "aten", object())
        operators.cache_clear()
        found, _ = (packed_attention(*parts, TREE, scaling=0.3) for _ in range(2))
    operators.cache_clear()
    assert caplog.text.count("attention to shared prefixes is computed for each sequence") == 1
    check_attention(found, shared, parts)
