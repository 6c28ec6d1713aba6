import torch
from hypothesis import given

from hybridflow.algorithms.shaping import token_rewards
from tests.oracles import advantages as oracle
from tests.unit.algorithms.examples import masks, normal, seeds, shapes, spoiled, token_mask


@given(shapes, masks, seeds)
def test_rewards_match_the_loops(shape, kind, seed):
    mask = token_mask(shape, kind, seed)
    scores, kl = normal(shape[:1], seed), spoiled(normal(shape, seed + 1), mask)
    expected = oracle.token_rewards(scores.tolist(), mask.tolist(), kl.tolist(), 0.1)
    torch.testing.assert_close(token_rewards(scores, mask, kl=kl, kl_coefficient=0.1), torch.tensor(expected))
