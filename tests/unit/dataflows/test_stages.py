"""Names of stages, and metrics of a batch."""

import math

import pytest
import torch

from hybridflow.controller import BatchRef
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.dataflows.stages import batch_metrics, stage_name
from tests.toys import sequences


@pytest.mark.parametrize(
    ("call", "stage"),
    [
        (("reward", "score"), "reward"),
        (("actor", "logprobs"), "old_log_prob"),
        (("reference", "logprobs"), "ref"),
        (("critic", "values"), "values"),
        (("critic", "advantages"), "adv"),
        (("actor", "update"), "update_actor"),
        (("reward_model", "preference_step"), "update_reward_model"),
        (("cost", "score"), "cost"),
        (("cost_critic", "values"), "cost_critic_values"),
        (("actor", "ask"), "actor_ask"),
    ],
)
def test_stages_have_the_names_that_dashboards_know(call, stage):
    assert stage_name(*call) == stage


def measured(scores: list[float], **rows: torch.Tensor):
    batch = sequences([2, 2, 3, 3], [4, 6, 1, 1]).with_columns(
        rows={
            "uid": torch.tensor([0, 0, 1, 1]),
            "scores": torch.tensor(scores),
            "truncated": torch.tensor([False, True, False, False]),
            **rows,
        }
    )
    return batch_metrics(BatchRef.of(batch, LocalBackend()))


def test_scores_and_lengths_are_summarized():
    found = {name: measure.value for name, measure in measured([1.0, 0.0, 0.5, 0.5]).items()}
    assert [found[f"critic/score/{part}"] for part in ("mean", "max", "min")] == [0.5, 1.0, 0.0]
    assert [found[f"response_length/{part}"] for part in ("mean", "max", "min")] == [3.0, 6.0, 1.0]
    assert [found[f"prompt_length/{part}"] for part in ("mean", "max", "min")] == [2.5, 3.0, 2.0]
    assert found["response_length/clip_ratio"] == 0.25


def test_the_fraction_of_groups_without_spread_is_reported_if_there_are_groups():
    assert measured([1.0, 0.0, 0.5, 0.5])["frac_reward_zero_std"].value == 0.5
    assert "frac_reward_zero_std" not in measured([1.0] * 4, uid=torch.arange(4))


def test_each_function_has_its_mean_over_the_responses_that_it_scored():
    found = measured([1.0] * 4, **{"rewards/format": torch.tensor([1.0, math.nan, 0.0, 0.5])})
    assert (found["rewards/format/mean"].value, found["rewards/format/mean"].weight) == (0.5, 3)
    assert found["rewards/format/not_scored"].value == 1
    found = measured([1.0] * 4, **{"rewards/format": torch.full((4,), math.nan)})
    assert "rewards/format/mean" not in found and found["rewards/format/not_scored"].value == 4


def test_failed_episodes_have_no_score_of_their_own():
    scores, failed = [1.0, 0.0, 0.0, 0.0], torch.tensor([False, False, True, True])
    found = measured(scores, failed=failed, **{"rewards/format": torch.tensor(scores)})
    assert (found["critic/score/mean"].value, found["critic/score/mean"].weight) == (0.5, 2)
    assert (found["rewards/format/mean"].value, found["rewards/format/mean"].weight) == (0.5, 2)
    assert "critic/score/mean" not in measured(scores, failed=torch.ones(4, dtype=torch.bool))


def test_information_of_environments_is_averaged_over_the_episodes_that_have_it():
    def of_rank(rows: int, **meta: float) -> BatchRef:
        batch = sequences([2] * rows, [3] * rows).with_columns(
            rows={
                "scores": torch.ones(rows),
                "truncated": torch.zeros(rows, dtype=torch.bool),
                "turns": torch.full((rows,), float(rows)),
                "failed": torch.arange(rows) == 1,
            },
            meta={f"environment/{key}/solved": value for key, value in meta.items()},
        )
        return BatchRef.of(batch, LocalBackend())

    limited = [of_rank(1, limited=1.0), of_rank(3, limited=0.0)]
    fraction = batch_metrics(BatchRef.concat(limited))["environment/solved_fraction"]
    assert (fraction.value, fraction.weight) == (0.25, 4.0)
    ranks = [of_rank(1, info=1.0, episodes_with=1.0), of_rank(3, info=0.0, episodes_with=2.0), of_rank(2)]
    found = batch_metrics(BatchRef.concat(ranks))
    assert (found["environment/info/solved"].value, found["environment/info/solved"].weight) == (1 / 3, 3.0)
    assert [found[f"num_turns/{part}"].value for part in ("mean", "max", "min")] == [14 / 6, 3.0, 1.0]
    assert found["environment/failed_fraction"].value == pytest.approx(2 / 6)


def test_metrics_of_functions_on_several_ranks_are_averaged_and_failures_add_up_once():
    def of_rank(rows: int, depth: float, failures: float) -> BatchRef:
        batch = sequences([2] * rows, [3] * rows).with_columns(
            rows={"scores": torch.ones(rows), "truncated": torch.zeros(rows, dtype=torch.bool)},
            meta={"rewards/f/depth": depth, "rewards/f/failures": failures},
        )
        later = batch.with_columns(rows={"values": torch.ones(rows)})  # passes the metadata on
        return BatchRef.of(batch, LocalBackend()).join(later)

    found = batch_metrics(BatchRef.concat([of_rank(1, 2.0, 1.0), of_rank(3, 6.0, 2.0)]))
    assert found["rewards/f/depth"].value == 5.0
    assert found["rewards/f/failures"].value == 3.0
