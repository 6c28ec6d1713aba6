"""What a dataflow names, and what it is given."""

from dataclasses import dataclass

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller import BatchRef
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.dataflows.interface import Dataflow, NoSettings, RoleNeed, role_needs
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.roles import FrozenModel, Policy, Scorer
from hybridflow.errors import BatchError
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
        return self.observe(prompts, prompts)


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
    dataflow, prompts = own(), Batch.of(rows={"uid": torch.tensor([7, 8])})
    batch = answered([8, 7, 7, 8])
    metrics = dataflow.observe(prompts, batch)
    assert metrics["critic/score/mean"].value == 1.0
    assert dataflow.last_batch is batch


@pytest.mark.parametrize(
    ("prompts", "uids", "message"), [([7, 8], [7, 7, 8], "lost 1 rows"), ([7, 7], [7, 7, 7, 7], "more than one prompt")]
)
def test_a_prompt_that_is_lost_or_comes_twice_is_an_error(prompts, uids, message):
    with pytest.raises(BatchError, match=message):
        own().observe(Batch.of(rows={"uid": torch.tensor(prompts)}), answered(uids))
