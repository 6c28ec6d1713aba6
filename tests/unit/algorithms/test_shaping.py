import torch
from hypothesis import given

from hybridflow.algorithms.shaping import token_rewards
from tests.oracles import advantages as oracle
from tests.unit.algorithms.examples import masks, normal, seeds, shapes, spoiled, token_mask


def test_the_score_stands_on_the_last_token_and_the_penalty_on_all():
    mask, kl = torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[2.0, 9.0, 4.0, 9.0]])
    rewards = token_rewards(torch.tensor([1.0]), mask, kl=kl, kl_coefficient=0.25)
    assert rewards.tolist() == [[-0.5, 0.0, 0.0, 0.0]]
    assert token_rewards(torch.tensor([1.0]), mask).tolist() == [[0.0, 0.0, 1.0, 0.0]]


@given(shapes, masks, seeds)
def test_rewards_match_the_loops(shape, kind, seed):
    mask = token_mask(shape, kind, seed)
    scores, kl = normal(shape[:1], seed), spoiled(normal(shape, seed + 1), mask)
    expected = oracle.token_rewards(scores.tolist(), mask.tolist(), kl.tolist(), 0.1)
    torch.testing.assert_close(token_rewards(scores, mask, kl=kl, kl_coefficient=0.1), torch.tensor(expected))
