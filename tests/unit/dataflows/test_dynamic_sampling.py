"""Dynamic sampling: every prompt that was drawn is kept, discarded or surplus, and the batch is full."""

import logging
from collections.abc import Mapping, Sequence

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller import BatchRef
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.dataflows.dapo import Gathered, dynamic_sampling
from hybridflow.errors import ConfigError

SAMPLES = 2
EQUAL, UNEQUAL = (1.0, 1.0), (0.0, 1.0)


def prompts_of(first: int, count: int) -> Batch:
    return Batch.of(
        rows={"uid": torch.arange(first, first + count)}, objects={"prompt": [f"p{first + i}" for i in range(count)]}
    )


class Stage:
    """Batches of three prompts, whose groups get the scores that the test says; the others' are equal."""

    def __init__(
        self, scores: Mapping[int, Sequence[float]], size: int = 3, filter_scores: Sequence[float] | None = None
    ) -> None:
        self.backend = LocalBackend()
        self.scores = scores
        self.size = size
        self.filter_scores = filter_scores
        self.drawn = size

    def score(self, prompts: Batch) -> BatchRef:
        given = prompts.repeat(SAMPLES)
        scores = torch.tensor([s for uid in prompts.row("uid").tolist() for s in self.scores.get(uid, EQUAL)])
        rows = {"scores": scores + 10.0 * given.row("sample_index"), "rewards/right": scores}
        if self.filter_scores is not None:
            rows["filter_scores"] = torch.tensor(self.filter_scores)
        return BatchRef.of(given.with_columns(rows=rows), self.backend)

    def further(self) -> BatchRef:
        self.drawn += self.size
        return self.score(prompts_of(self.drawn - self.size, self.size))

    def gather(self, *, metric: str = "right", max_refills: int = 4) -> Gathered:
        first = self.score(prompts_of(0, self.size))
        return dynamic_sampling(first, self.further, metric=metric, max_refills=max_refills)


def numbers(gathered: Gathered) -> dict[str, float]:
    return {name.removeprefix("dapo/"): measure.value for name, measure in gathered.metrics.items()}


def uids(gathered: Gathered) -> list[int]:
    kept, unused = gathered.batch.row("uid").tolist(), gathered.unused.row("uid").tolist()
    assert kept == [uid for uid in kept[::SAMPLES] for _ in range(SAMPLES)]
    drawn = int(gathered.metrics["dapo/prompts_drawn"].value)
    assert sorted(kept + unused) == [uid for uid in range(drawn) for _ in range(SAMPLES)]
    return kept[::SAMPLES]


def test_a_batch_that_teaches_everywhere_draws_nothing_more():
    stage = Stage(dict.fromkeys(range(3), UNEQUAL))
    gathered = stage.gather()
    assert uids(gathered) == [0, 1, 2]
    assert stage.drawn == 3
    expected = {"prompts_drawn": 3, "groups_kept": 3, "groups_discarded": 0, "groups_surplus": 0, "refills": 0}
    assert numbers(gathered) == expected | {"groups_without_signal": 0, "signal_fraction": 1.0}


def test_groups_of_equal_scores_are_replaced_by_those_of_further_prompts():
    stage = Stage(dict.fromkeys((1, 5, 7, 8), UNEQUAL))
    gathered = stage.gather()
    assert uids(gathered) == [1, 5, 7]
    assert stage.drawn == 9
    expected = {"prompts_drawn": 9, "groups_kept": 3, "groups_discarded": 5, "groups_surplus": 1, "refills": 2}
    assert {name: numbers(gathered)[name] for name in expected} == expected
    assert numbers(gathered)["signal_fraction"] == pytest.approx(4 / 9)


def test_past_the_limit_groups_without_signal_fill_up_and_a_warning_says_so(caplog):
    stage = Stage({4: UNEQUAL})
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        gathered = stage.gather(max_refills=2)
    assert uids(gathered) == [0, 1, 4]
    assert stage.drawn == 9
    assert (numbers(gathered)["groups_kept"], numbers(gathered)["groups_without_signal"]) == (1, 2)
    assert numbers(gathered)["groups_discarded"] == 6
    (record,) = caplog.records
    assert "dataflow_settings.max_refills=2" in record.getMessage()
    assert "2 of 3 groups" in record.getMessage()


def test_the_whole_score_can_be_looked_at_instead_of_one_function():
    assert uids(Stage({}).gather(metric="scores", max_refills=0)) == [0, 1, 2]
    assert numbers(Stage({}).gather(metric="scores"))["refills"] == 0


def test_filter_scores_take_the_place_of_the_score():
    filter_scores = [0.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    assert numbers(Stage({}, filter_scores=filter_scores).gather(metric="scores", max_refills=0))["groups_kept"] == 1
    assert numbers(Stage({}, filter_scores=filter_scores).gather(metric="right", max_refills=0))["groups_kept"] == 0


def test_a_function_that_did_not_score_counts_as_zero():
    nan = float("nan")
    stage = Stage({0: (nan, nan), 1: (nan, 1.0), 2: (nan, 0.0)})
    assert numbers(stage.gather(max_refills=0))["groups_kept"] == 1


def test_a_metric_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(ConfigError, match=r"dataflow_settings\.filter_metric=accuracy.*right"):
        Stage({}).gather(metric="accuracy")


def random_scores() -> list[tuple[int, dict[int, tuple[float, float]]]]:
    def teaching(seed: int) -> list[int]:
        return (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.3).nonzero().flatten().tolist()

    return [(seed, dict.fromkeys(teaching(seed), UNEQUAL)) for seed in range(20)]


@pytest.mark.parametrize(("seed", "scores"), random_scores(), ids=range(20))
def test_every_prompt_drawn_is_accounted_for(seed, scores):
    stage = Stage(scores, size=5)
    gathered = stage.gather(max_refills=seed % 6)
    found = numbers(gathered)
    assert found["prompts_drawn"] == stage.drawn == 5 * (found["refills"] + 1)
    assert found["groups_kept"] + found["groups_without_signal"] == len(uids(gathered)) == 5
    assert found["prompts_drawn"] == 5 + found["groups_discarded"] + found["groups_surplus"]
    teaching = [uid for uid in range(stage.drawn) if uid in scores]
    kept = [uid for uid in uids(gathered) if uid in scores]
    assert kept == teaching[: len(kept)]
    assert len(kept) == min(5, len(teaching))
