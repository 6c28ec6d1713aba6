"""Every prompt that enters leaves, once."""

import pytest
import torch

from hybridflow.batch.accounting import check_accounted, check_unique
from hybridflow.errors import BatchError

ENTERED = torch.tensor([3, 7, 9])


def test_all_samples_of_all_prompts_in_any_order_are_fine():
    check_accounted(ENTERED, torch.tensor([9, 3, 7, 7, 3, 9]), samples_per_prompt=2, stage="step")
    check_unique(ENTERED)


def test_a_lost_prompt_is_named():
    with pytest.raises(BatchError, match=r"'filter' lost 1 rows \(uids \[7\]\)") as caught:
        check_accounted(ENTERED, torch.tensor([3, 9]), samples_per_prompt=1, stage="filter")
    assert "exactly once" in caught.value.remedy
    assert "all rows that it generated to self.observe" in caught.value.remedy


def test_a_duplicated_prompt_is_named():
    with pytest.raises(BatchError, match=r"added 1 \(uids \[9\]\)"):
        check_accounted(ENTERED, torch.tensor([3, 7, 9, 9]), samples_per_prompt=1, stage="step")


def test_a_foreign_prompt_in_anothers_place_is_seen():
    with pytest.raises(BatchError, match=r"lost 1 rows \(uids \[9\]\) and added 1 \(uids \[8\]\)"):
        check_accounted(ENTERED, torch.tensor([3, 7, 8]), samples_per_prompt=1, stage="step")


def test_one_number_for_two_prompts_is_an_error():
    with pytest.raises(BatchError, match=r"1 uids stand for more than one prompt \(first: \[4\]\)") as caught:
        check_unique(torch.tensor([4, 5, 4]))
    assert "position in the data stream" in caught.value.remedy
