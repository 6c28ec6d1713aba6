"""Failed episodes and rewards other than the environment's: they are not scored, and count as nothing."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.batch import Batch, Ragged
from hybridflow.workers.failed_episodes import scored_without_failures
from tests.unit.workers.test_frozen_roles import rewards

UIDS = torch.tensor([4, 4, 4, 7, 7, 9])
FAILED = torch.tensor([False, True, False, False, True, True])
SCORES = torch.tensor([1.0, -50.0, 3.0, 0.5, -50.0, -50.0])


def batch_of(failed: torch.Tensor = FAILED) -> Batch:
    ids = Ragged.from_rows([[5], [6, 6], [7, 7, 7], [8], [9], [10, 10]], torch.int64)
    return Batch.of(
        rows={"uid": UIDS, "own": SCORES, "failed": failed},
        tokens={"response_ids": ids},
        objects={"prompt": [f"prompt {row}" for row in range(6)]},
    )


def scored_by(batch: Batch) -> Batch:
    """Scores, of which the second component is NaN for one row, and a score per token."""
    own = batch.row("own")
    ids = batch.tokens("response_ids")
    return Batch.of(
        rows={"scores": own, "components": torch.stack([own, own.where(own != 3.0, torch.nan)], 1)},
        tokens={"token_scores": ids.like(ids.values.float())},
        meta={"rewards/f/depth": float(len(batch))},
    )


def test_a_failed_episode_gets_the_mean_of_its_groups_others_in_every_column():
    found = scored_without_failures(batch_of(), scored_by)
    assert found.row("scores").tolist() == [1.0, 2.0, 3.0, 0.5, 0.5, 0.0]
    means = group_statistics(found.row("scores"), UIDS).mean
    assert means[~FAILED].tolist() == [2.0, 2.0, 0.5]  # those of the episodes that have not failed
    assert found.row("components")[:, 1].nan_to_num(-1.0).tolist() == [1.0, 1.0, -1.0, 0.5, 0.5, 0.0]
    assert found.tokens("token_scores").lengths.tolist() == [1, 2, 3, 1, 1, 2]
    assert [row.tolist() for row in found.tokens("token_scores").rows()] == [
        [5.0], [0.0, 0.0], [7.0] * 3, [8.0], [0.0], [0.0, 0.0],
    ]  # fmt: skip
    assert found.meta == {"rewards/f/depth": 3.0}


@pytest.mark.parametrize("failed", [torch.zeros(6, dtype=torch.bool), None])
def test_without_failures_the_scores_are_as_they_are(failed):
    batch = batch_of() if failed is None else batch_of(failed)
    batch = batch.only(["uid", "own", "response_ids"]) if failed is None else batch
    assert scored_without_failures(batch, scored_by).row("scores").tolist() == SCORES.tolist()


def test_if_all_episodes_failed_their_scores_are_zeros():
    found = scored_without_failures(batch_of(torch.ones(6, dtype=torch.bool)), scored_by)
    assert found.row("scores").tolist() == [0.0] * 6 and found.row("components").shape == (6, 2)
    assert not found.tokens("token_scores").values.any()


def test_a_reward_function_is_not_called_for_a_failed_episode(toy_dir, tmp_path: Path):
    seen = tmp_path / "seen.json"
    (tmp_path / "own.py").write_text(
        "import json, pathlib\n"
        "def own(prompts, completions, **columns):\n"
        f"    pathlib.Path({str(seen)!r}).write_text(json.dumps(prompts))\n"
        "    return [float(prompt.split()[1]) for prompt in prompts]\n"
    )
    worker = rewards(toy_dir(), functions=[f"{tmp_path}/own.py:own"])
    found = worker.score(batch_of())
    worker.close()
    assert json.loads(seen.read_text()) == ["prompt 0", "prompt 2", "prompt 3"]
    assert found.row("scores").tolist() == found.row("rewards/own").tolist() == [0.0, 1.0, 2.0, 3.0, 3.0, 0.0]
