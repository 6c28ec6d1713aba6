import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.losses.kto import prospect, reference_point
from hybridflow.algorithms.losses.preference import (
    hinge_preference,
    length_normalized_preference,
    odds_ratio_preference,
    sigmoid_preference,
    squared_preference,
)
from tests.oracles import preferences as oracle
from tests.unit.algorithms.examples import generator, normal, seeds

betas = st.sampled_from([0.01, 0.1, 0.5, 2.0])


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=1e-6, rtol=1e-5)


def token_logprobs(seed, count=5):
    """Of each response, log-probabilities of its tokens."""
    lengths = torch.randint(1, 8, (count,), generator=generator(seed)).tolist()
    return [(-normal((n,), seed + i, dtype=torch.float64).abs() - 0.01).tolist() for i, n in enumerate(lengths)]


def means(rows):
    return torch.tensor([sum(row) / len(row) for row in rows], dtype=torch.float64)


@given(seeds, betas, st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.0, 0.7]))
def test_losses_of_ratios_match_the_oracles(seed, beta, label_smoothing, margin):
    chosen, rejected = normal((6,), seed, dtype=torch.float64), normal((6,), seed + 1, dtype=torch.float64)
    pairs = list(zip(chosen.tolist(), rejected.tolist(), strict=True))
    numbers = {"beta": beta, "label_smoothing": label_smoothing, "margin": margin}
    close(sigmoid_preference(chosen, rejected, **numbers), [oracle.dpo(c, r, **numbers) for c, r in pairs])
    found = hinge_preference(chosen, rejected, beta=beta, margin=margin)
    close(found, [oracle.hinge(c, r, beta=beta, margin=margin) for c, r in pairs])
    lengths = torch.randint(1, 20, (2, 6), generator=generator(seed)).double()
    found = squared_preference(chosen, rejected, lengths[0], lengths[1], beta=beta)
    counts = zip(*lengths.int().tolist(), strict=True)
    close(found, [oracle.ipo(c, r, n, beta=beta) for (c, r), n in zip(pairs, counts, strict=True)])


@given(seeds, betas)
def test_losses_without_a_reference_match_the_oracles(seed, beta):
    chosen, rejected = token_logprobs(seed), token_logprobs(seed + 100)
    rows = list(zip(chosen, rejected, strict=True))
    found = odds_ratio_preference(means(chosen), means(rejected), beta=beta)
    close(found, [oracle.orpo(c, r, beta=beta) for c, r in rows])
    found = length_normalized_preference(means(chosen), means(rejected), beta=beta, margin=0.5)
    close(found, [oracle.simpo(c, r, beta=beta, gamma=0.5 * beta) for c, r in rows])


@given(seeds, betas, st.lists(st.booleans(), min_size=5, max_size=5))
def test_kto_matches_the_oracle(seed, beta, labels):
    ratios, others = normal((5,), seed, dtype=torch.float64), normal((5,), seed + 1, dtype=torch.float64)
    anchor = reference_point(others.sum(), torch.tensor(5.0))
    found = prospect(ratios, torch.tensor(labels), anchor, beta=beta, desirable_weight=1.3, undesirable_weight=0.8)
    expected = oracle.kto(ratios.tolist(), labels, others.tolist(), beta=beta, desirable=1.3, undesirable=0.8)
    close(found, expected)


def test_the_reference_point_is_never_below_zero_and_has_no_gradient():
    ratios = torch.tensor([-3.0, 1.0], requires_grad=True)
    assert reference_point(ratios.sum(), torch.tensor(2.0)).item() == 0.0
    assert reference_point(torch.tensor(0.0), torch.tensor(0.0)).item() == 0.0
    assert not reference_point(ratios.exp().sum(), torch.tensor(2.0)).requires_grad


def test_responses_beyond_all_measure_stay_finite():
    far = torch.tensor([-1e4, 1e4])
    assert sigmoid_preference(far, -far, beta=1.0).tolist() == [2e4, 0.0]
    certain = torch.tensor([0.0, -1e3], requires_grad=True)
    loss = odds_ratio_preference(certain, certain.flip(0), beta=1.0)
    (grad,) = torch.autograd.grad(loss.sum(), certain)
    assert loss.isfinite().all() and grad.isfinite().all()
