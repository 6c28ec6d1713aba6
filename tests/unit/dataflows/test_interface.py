"""What a dataflow names, and what it is given."""

from dataclasses import dataclass

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller import BatchRef
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.dataflows.interface import Dataflow, NoSettings, RoleNeed, is_in_halves, role_needs
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.roles import FrozenModel, Policy, Scorer
from hybridflow.dataflows.step import check_observed
from hybridflow.errors import BatchError, ConfigError
from hybridflow.observability.metrics import last
from tests.toys import sequences


class Own(Dataflow):
    """Roles among other annotations."""

    actor: Policy
    notes: dict[str, int]
    teacher: FrozenModel | None
    grader: Scorer

    @dataclass
    class Settings:
        limit: int = 3

    def step(self, prompts):
        return self.observe(prompts)


class Longer(Own):
    """A dataflow made from another."""

    second_grader: Scorer


def answered(uids: list[int]) -> BatchRef:
    batch = sequences([2] * len(uids), [3] * len(uids)).with_columns(
        rows={
            "uid": torch.tensor(uids),
            "scores": torch.ones(len(uids)),
            "truncated": torch.zeros(len(uids), dtype=torch.bool),
        }
    )
    return BatchRef.of(batch, LocalBackend())


def own(samples: int = 2) -> Own:
    return Own({}, settings=Own.Settings(), samples_per_prompt=samples)


def test_roles_are_read_off_the_annotations():
    assert role_needs(Own) == {
        "actor": RoleNeed(Policy, is_optional=False),
        "teacher": RoleNeed(FrozenModel, is_optional=True),
        "grader": RoleNeed(Scorer, is_optional=False),
    }
    assert set(role_needs(Longer)) == {"actor", "teacher", "grader", "second_grader"}


def test_a_role_that_is_not_there_is_none():
    actor = object()
    dataflow = Own({"actor": actor}, settings=Own.Settings(), samples_per_prompt=1)
    assert (dataflow.actor, dataflow.teacher) == (actor, None)
    assert dataflow.settings.limit == 3
    assert PPO.Settings is NoSettings


def test_what_is_observed_is_accounted_for_and_kept():
    dataflow, batch = own(), answered([8, 7, 7, 8])
    unused = answered([3, 3])
    metrics = dataflow.observe(batch, unused=unused)
    assert metrics["critic/score/mean"].value == 1.0
    assert dataflow.last_batch is batch
    assert (dataflow.observed, dataflow.unused) == ([batch], [unused])
    dataflow.forget_observed()
    assert not dataflow.observed and not dataflow.unused


@pytest.mark.parametrize("uids", [[7, 7, 8], [7, 7, 7, 7], [7, 7, 8, 8, 8]])
def test_a_group_that_lost_or_doubled_samples_is_an_error(uids):
    with pytest.raises(BatchError, match=r"of \d prompts have lost or duplicated samples") as caught:
        own().observe(answered(uids))
    assert "Pass all generated rows to self.observe, each exactly once" in caught.value.remedy


@pytest.mark.parametrize(
    ("prompts", "uids", "is_all", "message"),
    [
        ([7, 8], [7, 7], True, r"lost 2 rows \(uids \[8\]\)"),
        ([7, 8], [7, 7], False, r"lost 2 rows \(uids \[8\]\)"),
        ([7, 7], [7, 7], True, "more than one prompt"),
        ([7], [7, 7, 9, 9], True, r"added 2 \(uids \[9\]\)"),
    ],
)
def test_a_prompt_of_the_step_that_is_lost_or_comes_twice_is_an_error(prompts, uids, is_all, message):
    given = Batch.of(rows={"uid": torch.tensor(prompts)})
    with pytest.raises(BatchError, match=message):
        check_observed(given, [torch.tensor(uids)], 2, is_all=is_all)


def test_further_prompts_that_a_step_drew_may_be_observed():
    prompts = Batch.of(rows={"uid": torch.tensor([7])})
    check_observed(prompts, [torch.tensor([7, 7, 9, 9])], 2, is_all=False)


def test_a_step_is_learn_of_collect_unless_the_class_has_its_own():
    class Halves(Dataflow):
        def collect(self, prompts):
            return answered(prompts.row("uid").tolist())

        def learn(self, batch):
            return {"rows": last(len(batch))}

    class Nothing(Halves):
        def collect(self, prompts):
            return None

    def made(kind):
        return kind({}, settings=NoSettings(), samples_per_prompt=1)

    assert is_in_halves(Halves) and not is_in_halves(Own)
    assert made(Halves).step(Batch.of(rows={"uid": torch.arange(3)}))["rows"].value == 3
    with pytest.raises(ConfigError, match="Nothing.collect returned NoneType, not a batch") as caught:
        made(Nothing).step(Batch.of(rows={"uid": torch.arange(3)}))
    assert "return self.reward.score" in caught.value.remedy
