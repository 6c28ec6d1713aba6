"""PPO, GRPO and imitation for a few steps on a toy model, in this process."""

from dataclasses import replace

import pytest
import torch

from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import NoSettings
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import WorkerError
from hybridflow.observability.metrics import plain
from tests.unit.dataflows.programs import Roles, calculator_prompts, local_roles

SAMPLES = 2
PPO_NUMBERS = Algorithm(advantage="gae")
GRPO_NUMBERS = Algorithm(advantage="grpo")


def program(kind, roles: Roles, settings: object | None = None):
    without = {} if kind is SFT else {"reference": None}
    made = kind(roles.groups | without, settings=settings or kind.Settings(), samples_per_prompt=SAMPLES)
    made.actor.publish_weights(version=0).result()
    return made


def steps(dataflow, directory, count: int = 2) -> list[dict]:
    """Some steps on the same sums, under new numbers each time as a loader gives them."""
    prompts, found = calculator_prompts(directory), []
    for step in range(count):
        dataflow.iteration = step
        uids = torch.arange(step * len(prompts), (step + 1) * len(prompts))
        found.append(dataflow.step(prompts.with_columns(rows={"uid": uids})))
    return found


def shortness(directory):
    """A reward that rises when responses end early."""
    (directory / "short.py").write_text(
        "def short(prompts, completion_ids, **columns):\n    return [-float(len(ids)) for ids in completion_ids]\n"
    )
    return f"{directory}/short.py:short"


@pytest.mark.parametrize(("kind", "numbers"), [(PPO, PPO_NUMBERS), (GRPO, GRPO_NUMBERS)])
def test_every_step_samples_with_the_weights_of_the_step_before(toy_dir, kind, numbers):
    roles = local_roles(toy_dir(), algorithm=numbers)
    dataflow = program(kind, roles)
    versions = []
    for step in range(2):
        dataflow.iteration = step
        dataflow.step(calculator_prompts(toy_dir()).with_columns(rows={"uid": torch.arange(4) + 4 * step}))
        versions.append(dataflow.last_batch.row("weight_version").unique().tolist())
        assert dataflow.last_batch.row("uid").tolist() == [4 * step + i // SAMPLES for i in range(4 * SAMPLES)]
    assert versions == [[0], [1]]


@pytest.mark.parametrize(("kind", "numbers"), [(PPO, PPO_NUMBERS), (GRPO, GRPO_NUMBERS)])
def test_an_algorithm_raises_its_reward(toy_dir, tmp_path, kind, numbers):
    roles = local_roles(toy_dir(), algorithm=numbers, rewards=[shortness(tmp_path)], rate=0.01)
    scores = [step["critic/score/mean"].value for step in steps(program(kind, roles), toy_dir(), 12)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 1.0


def test_ppo_reports_what_dashboards_know(toy_dir):
    (first, _) = steps(program(PPO, local_roles(toy_dir(), algorithm=PPO_NUMBERS)), toy_dir())
    expected = ["actor/pg_loss", "actor/ppo_kl", "critic/vf_loss", "critic/values/mean", "critic/returns/mean"]
    expected += ["critic/rewards/mean", "critic/advantages/mean", "critic/score/mean", "response_length/mean"]
    assert set(expected) <= first.keys()
    assert first["training/rollout_logprobs_diff_max"].value < 1e-4


@pytest.mark.parametrize("placement", [KLPlacement.reward, KLPlacement.loss])
@pytest.mark.parametrize(("kind", "numbers"), [(PPO, PPO_NUMBERS), (GRPO, GRPO_NUMBERS)])
def test_the_reference_is_the_policy_at_first_and_differs_later(toy_dir, tmp_path, kind, numbers, placement):
    numbers = replace(numbers, kl=KL(placement=placement, coefficient=0.1, estimator="k3"))
    roles = local_roles(toy_dir(), algorithm=numbers, rewards=[shortness(tmp_path)])
    dataflow = kind(roles.groups, settings=kind.Settings(), samples_per_prompt=SAMPLES)
    name = "actor/reward_kl_penalty" if placement is KLPlacement.reward else "actor/kl_loss"
    first, second = steps(dataflow, toy_dir())
    assert first[name].value == pytest.approx(0.0, abs=1e-6)
    assert second[name].value > 1e-5


@pytest.mark.parametrize(("kind", "numbers"), [(PPO, PPO_NUMBERS), (GRPO, GRPO_NUMBERS)])
def test_without_a_pass_for_old_logprobs_the_run_is_the_same_bit_for_bit(toy_dir, tmp_path, kind, numbers):
    """One optimizer step per batch: the update's own forward pass has the numbers of the one that is left out."""
    found, trained = [], []
    for wants in (True, False):
        roles = local_roles(toy_dir(), algorithm=numbers, rewards=[shortness(tmp_path)])
        dataflow = program(kind, roles)
        dataflow.wants_old_logprobs = wants
        roles.backend.drain_calls()
        metrics = steps(dataflow, toy_dir(), 3)
        calls = [(role, method) for role, method, _ in roles.backend.drain_calls()]
        assert (("actor", "logprobs") in calls) is wants
        trained.append([{n: v for n, v in plain(step).items() if not n.startswith("timing_s/")} for step in metrics])
        batch = roles.groups["actor"].logprobs(dataflow.last_batch).fetch(["old_logprobs"])
        found.append(batch.tokens("old_logprobs").values)
    assert min(step["actor/grad_norm"] for step in trained[0]) > 0.1
    for given, absent in zip(*trained, strict=True):
        assert {n: (v, absent[n]) for n, v in given.items() if absent[n] != v} == {}
    assert 0.0 < trained[1][0]["training/rollout_logprobs_diff_max"] < 1e-3
    assert torch.equal(*found)


def test_without_that_pass_a_kl_penalty_in_the_reward_reads_the_rollouts_logprobs(toy_dir, tmp_path):
    numbers = replace(PPO_NUMBERS, kl=KL(placement=KLPlacement.reward, coefficient=0.5))
    trained = []
    for wants in (True, False):
        roles = local_roles(toy_dir(), algorithm=numbers, rewards=[shortness(tmp_path)])
        dataflow = PPO(roles.groups, settings=PPO.Settings(), samples_per_prompt=SAMPLES)
        dataflow.wants_old_logprobs = wants
        trained.append(plain(steps(dataflow, toy_dir(), 3)[-1]))
    for name in ("actor/reward_kl_penalty", "critic/rewards/mean", "actor/pg_loss", "actor/grad_norm"):
        assert trained[1][name] == pytest.approx(trained[0][name], rel=1e-3, abs=1e-5), name
    assert trained[0]["actor/reward_kl_penalty"] > 1e-5


def test_imitation_lowers_its_loss_and_publishes(toy_dir):
    roles = local_roles(toy_dir())
    prompts = calculator_prompts(toy_dir())
    ids = prompts.tokens("prompt_ids")
    demonstrations = prompts.with_columns(
        rows={"uid": torch.arange(4)},
        tokens={"response_ids": ids, "response_mask": ids.like(torch.ones(len(ids.values)))},
    )
    dataflow, losses = program(SFT, roles, NoSettings()), []
    for step in range(5):
        dataflow.iteration = step
        losses.append(dataflow.step(demonstrations)["train/loss"].value)
    assert losses[-1] < losses[0]
    batch = roles.groups["rollout"].generate(demonstrations.only(["uid", "prompt_ids"]).repeat(1))
    assert batch.row("weight_version").unique().tolist() == [5]


def test_a_dataflow_that_forgets_to_publish_is_told_so(toy_dir):
    class Forgetful(GRPO):
        def step(self, prompts):
            batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
            batch = self.actor.advantages(batch.join(self.reward.score(batch)))
            self.actor.update(batch).result()
            return {}

    dataflow = program(Forgetful, local_roles(toy_dir()))
    with pytest.raises(WorkerError, match=r"rollout\.generate.*not published.*publish_weights"):
        steps(dataflow, toy_dir())
