"""The version of each token, from runs of tokens."""

import torch

from hybridflow.batch import Ragged
from hybridflow.batch.versions import token_versions


def test_each_token_has_the_version_of_its_run():
    runs = Ragged.from_rows(
        [torch.tensor(row) for row in ([[3, 0], [5, 2], [6, 3]], [[4, 0]], [[3, 0]], [[2, 0], [9, 1]])]
    )
    versions = token_versions(runs, torch.tensor([5, 2, 0, 2]))
    assert [row.tolist() for row in versions.rows()] == [[3, 3, 5, 6, 6], [4, 4], [], [2, 9]]
