import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.requests import Request, Responses, checked_prompts, response_batch
from hybridflow.errors import BatchError, EngineError


def prompts(*lengths: int) -> Batch:
    ids = Ragged.from_rows([torch.ones(n, dtype=torch.int64) for n in lengths], torch.int64)
    return Batch.of(rows={"uid": torch.arange(len(lengths)) + 40}, tokens={"prompt_ids": ids}).repeat(1)


def test_a_prompt_and_response_past_the_limit_name_both_settings():
    assert checked_prompts(prompts(3, 5), max_response_tokens=5, limit_tokens=10).lengths.tolist() == [3, 5]
    with pytest.raises(EngineError, match=r"prompt of 6 tokens and a response of 5 make 11.*limit is 10") as caught:
        checked_prompts(prompts(3, 6), max_response_tokens=5, limit_tokens=10)
    assert "data.max_prompt_tokens" in caught.value.remedy and "data.max_response_tokens" in caught.value.remedy


def test_an_empty_prompt_is_named_by_its_uid():
    with pytest.raises(BatchError, match="uid 41 has no tokens.*at least one token"):
        checked_prompts(prompts(3, 0), max_response_tokens=5, limit_tokens=10)


def test_rows_without_a_sample_index_are_refused():
    with pytest.raises(BatchError, match="sample_index"):
        checked_prompts(prompts(3).only(["uid", "prompt_ids"]), max_response_tokens=5, limit_tokens=10)


def responses_of(*runs: list[tuple[int, int]], logprobs: Ragged | None = None) -> Responses:
    """Two responses, of 2 tokens and of 1."""
    requests = [
        Request(row, (row, 0), torch.ones(1, dtype=torch.int64), 0, Sampling(), 2, own) for row, own in enumerate(runs)
    ]
    ids = Ragged.from_rows([torch.tensor([5, 1]), torch.tensor([7])])
    return Responses(requests, ids, logprobs or ids.like(torch.zeros(3)), torch.tensor([False, True]))


def test_responses_carry_mask_versions_and_temperature():
    batch = response_batch(responses_of([(4, 0), (5, 1), (6, 2)], [(3, 0)]), Sampling(temperature=0.5))
    assert batch.row("weight_version").tolist() == [4, 3]
    assert [row.tolist() for row in batch.tokens("version_runs").rows()] == [[[4, 0], [5, 1]], [[3, 0]]]
    assert batch.row("weight_version").dtype == batch.tokens("version_runs").values.dtype == torch.int64
    assert batch.row("truncated").tolist() == [False, True]
    assert batch.tokens("response_mask").values.tolist() == [1.0, 1.0, 1.0]
    assert batch.tokens("rollout_logprobs").lengths.tolist() == [2, 1]
    assert batch.meta == {"temperature": 0.5}


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_log_probabilities_that_are_not_finite_are_refused(number):
    logprobs = Ragged.from_rows([torch.tensor([0.0, number]), torch.tensor([0.0])])
    with pytest.raises(
        EngineError, match=r"logits are NaN or infinite in 1 of 2 responses \(weights of step 4\)"
    ) as caught:
        response_batch(responses_of([(4, 0)], [(5, 0)], logprobs=logprobs), Sampling())
    assert "actor.optimizer.learning_rate" in caught.value.remedy and "model.path" in caught.value.remedy
