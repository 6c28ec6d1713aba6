"""Every prompt that enters leaves, once."""

import pytest
import torch

from hybridflow.batch.accounting import check_accounted, check_unique
from hybridflow.errors import BatchError

ENTERED = torch.tensor([3, 7, 9])


def test_all_samples_of_all_prompts_in_any_order_are_fine():
    check_accounted(ENTERED, torch.tensor([9, 3, 7, 7, 3, 9]), samples_per_prompt=2, stage="step")
    check_unique(ENTERED)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ([3, 9], r"'step' lost 1 rows \(uids \[7\]\)"),
        ([3, 7, 9, 9], r"added 1 \(uids \[9\]\)"),
        ([3, 7, 8], r"lost 1 rows \(uids \[9\]\) and added 1 \(uids \[8\]\)"),
    ],
    ids=["lost", "duplicated", "replaced"],
)
def test_rows_that_are_lost_or_added_are_named(left, message):
    with pytest.raises(BatchError, match=message) as caught:
        check_accounted(ENTERED, torch.tensor(left), samples_per_prompt=1, stage="step")
    assert "all rows that it generated to self.observe" in caught.value.remedy


def test_one_number_for_two_prompts_is_an_error():
    with pytest.raises(BatchError, match=r"1 uids belong to more than one prompt \(first: \[4\]\)") as caught:
        check_unique(torch.tensor([4, 5, 4]))
    assert "position in the data stream" in caught.value.remedy
