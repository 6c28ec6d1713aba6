"""Every algorithm for a few steps on a toy model, in this process."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.controller import BatchRef
from hybridflow.controller.partition import divided
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pf_ppo import PFPPO, ungrouped
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.ppo_ptx import PPOPtx
from hybridflow.dataflows.remax import ReMax
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import BatchError, ConfigError
from hybridflow.launch.plan.dataflow import make_settings
from hybridflow.observability.metrics import Metrics, plain
from tests.oracles import constraints
from tests.unit.dataflows.programs import PROMPTS, Roles, calculator_prompts, local_roles

SAMPLES = 2
GAE = Algorithm(advantage="gae")
NUMBERS = {ReMax: Algorithm(advantage="remax"), DAPO: Algorithm(advantage="grpo"), GRPO: Algorithm(advantage="grpo")}


class Sums:
    """An endless stream of the same sums under new numbers."""

    def __init__(self, rows: Batch, first: int = 0) -> None:
        self.rows = rows
        self.place = first

    def next(self) -> Batch:
        self.place += len(self.rows)
        uids = torch.arange(self.place - len(self.rows), self.place)
        return self.rows.with_columns(rows={"uid": uids})


def function(folder: Path, name: str, formula: str) -> str:
    """A reward function of the tokens of each response."""
    file = folder / f"{name}.py"
    file.write_text(
        f"def {name}(prompts, completion_ids, **columns):\n    return [{formula} for ids in completion_ids]\n"
    )
    return f"{file}:{name}"


def texts(directory: Path) -> Batch:
    """Demonstrations: each sum followed by itself."""
    prompts = calculator_prompts(directory)
    ids = prompts.tokens("prompt_ids")
    return prompts.with_columns(tokens={"response_ids": ids, "response_mask": ids.like(torch.ones(len(ids.values)))})


def program(kind: type[Dataflow], directory: Path, roles: Roles, **settings: object) -> Dataflow:
    """A dataflow at its first step, without a reference."""
    groups = {name: group for name, group in roles.groups.items() if name != "reference"}
    return started(kind(groups, settings=kind.Settings(**settings), samples_per_prompt=SAMPLES), directory, roles)


def started(made: Dataflow, directory: Path, roles: Roles) -> Dataflow:
    """The dataflow, with prompts to draw and published weights."""
    made.streams = {"prompts": Sums(calculator_prompts(directory)), "pretraining": Sums(texts(directory))}
    roles.groups["actor"].publish_weights(version=0).result()
    return made


def steps(dataflow: Dataflow, count: int, *, first: int = 0) -> list[Metrics]:
    """Metrics of some steps, each on the next prompts."""
    found = []
    for step in range(first, first + count):
        dataflow.iteration = step
        found.append(dataflow.step(dataflow.streams["prompts"].next()))
    return found


def values(found: list[Metrics], name: str) -> list[float]:
    return [metrics[name].value for metrics in found]


@pytest.mark.parametrize("kind", [PPO, GRPO, ReMax, DAPO, PFPPO, PPOPtx, SafeRLHF])
def test_an_algorithm_raises_its_reward(toy_dir, tmp_path, kind: type[Dataflow]):
    short = function(tmp_path, "short", "-float(len(ids))")
    costs = [function(tmp_path, "nothing", "0.0")] if kind is SafeRLHF else []
    roles = local_roles(toy_dir(), algorithm=NUMBERS.get(kind, GAE), rewards=[short], costs=costs)
    scores = values(steps(program(kind, toy_dir(), roles), 12), "critic/score/mean")
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.5


@pytest.mark.parametrize("kind", [PPO, GRPO])
def test_every_step_samples_with_the_weights_of_the_step_before(toy_dir, kind):
    dataflow = program(kind, toy_dir(), local_roles(toy_dir(), algorithm=NUMBERS.get(kind, GAE)))
    versions = []
    for step in range(2):
        steps(dataflow, 1, first=step)
        versions.append(dataflow.last_batch.row("weight_version").unique().tolist())
        assert dataflow.last_batch.row("uid").tolist() == [4 * step + i // SAMPLES for i in range(4 * SAMPLES)]
    assert versions == [[0], [1]]


@pytest.mark.parametrize("placement", [KLPlacement.reward, KLPlacement.loss])
@pytest.mark.parametrize("kind", [PPO, GRPO])
def test_the_reference_is_the_policy_at_first_and_differs_later(toy_dir, tmp_path, kind, placement):
    numbers = replace(NUMBERS.get(kind, GAE), kl=KL(placement=placement, coefficient=0.1, estimator="k3"))
    roles = local_roles(toy_dir(), algorithm=numbers, rewards=[function(tmp_path, "short", "-float(len(ids))")])
    dataflow = started(kind(roles.groups, settings=kind.Settings(), samples_per_prompt=SAMPLES), toy_dir(), roles)
    name = "actor/reward_kl_penalty" if placement is KLPlacement.reward else "actor/kl_loss"
    first, second = values(steps(dataflow, 2), name)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-5


@pytest.mark.parametrize("kind", [PPO, GRPO])
def test_without_a_pass_for_old_logprobs_the_run_is_the_same_bit_for_bit(toy_dir, tmp_path, kind):
    """One optimizer step per batch: the update's own forward pass has the numbers of the one that is left out."""
    found, trained, short = [], [], function(tmp_path, "short", "-float(len(ids))")
    for wants in (True, False):
        roles = local_roles(toy_dir(), algorithm=NUMBERS.get(kind, GAE), rewards=[short])
        dataflow = program(kind, toy_dir(), roles)
        dataflow.wants_old_logprobs = wants
        roles.backend.drain_calls()
        metrics = steps(dataflow, 3)
        calls = [span.name for span in roles.backend.drain_calls()]
        assert ("actor.logprobs" in calls) is wants
        trained.append([{n: v for n, v in plain(step).items() if not n.startswith("timing_s/")} for step in metrics])
        batch = roles.groups["actor"].logprobs(dataflow.last_batch).fetch(["old_logprobs"])
        found.append(batch.tokens("old_logprobs").values)
    assert min(step["actor/grad_norm"] for step in trained[0]) > 0.1
    for given, absent in zip(*trained, strict=True):
        assert {n: (v, absent[n]) for n, v in given.items() if absent[n] != v} == {}
    assert 0.0 < trained[1][0]["training/rollout_logprobs_diff_max"] < 1e-3
    assert torch.equal(*found)


def test_without_that_pass_a_kl_penalty_in_the_reward_reads_the_rollouts_logprobs(toy_dir, tmp_path):
    numbers = replace(GAE, kl=KL(placement=KLPlacement.reward, coefficient=0.5))
    trained, short = [], function(tmp_path, "short", "-float(len(ids))")
    for wants in (True, False):
        roles = local_roles(toy_dir(), algorithm=numbers, rewards=[short])
        dataflow = started(PPO(roles.groups, settings=PPO.Settings(), samples_per_prompt=SAMPLES), toy_dir(), roles)
        dataflow.wants_old_logprobs = wants
        trained.append(plain(steps(dataflow, 3)[-1]))
    for name in ("actor/reward_kl_penalty", "critic/rewards/mean", "actor/pg_loss", "actor/grad_norm"):
        assert trained[1][name] == pytest.approx(trained[0][name], rel=1e-3, abs=1e-5), name
    assert trained[0]["actor/reward_kl_penalty"] > 1e-5


def test_supervised_steps_lower_their_loss_and_publish(toy_dir):
    roles = local_roles(toy_dir())
    dataflow = program(SFT, toy_dir(), roles)
    dataflow.streams = {"prompts": Sums(texts(toy_dir()))}
    losses = values(steps(dataflow, 5), "train/loss")
    assert losses[-1] < losses[0]
    batch = roles.groups["rollout"].generate(Sums(calculator_prompts(toy_dir())).next().repeat(1))
    assert batch.row("weight_version").unique().tolist() == [5]


def test_the_baseline_of_a_sample_is_the_score_of_its_prompts_greedy_response(toy_dir, tmp_path):
    roles = local_roles(toy_dir(), algorithm=NUMBERS[ReMax], rewards=[function(tmp_path, "first", "float(ids[0])")])
    dataflow = program(ReMax, toy_dir(), roles)
    prompts = Sums(calculator_prompts(toy_dir())).next()
    greedy = roles.groups["rollout"].generate(prompts.repeat(1), "greedy")
    assert isinstance(greedy, BatchRef)
    expected = [float(row[0]) for row in greedy.fetch(["response_ids"]).tokens("response_ids").rows()]
    dataflow.step(prompts)
    assert dataflow.last_batch is not None
    assert len(set(expected)) > 1
    assert dataflow.last_batch.row("baselines").tolist() == [score for score in expected for _ in range(SAMPLES)]


def test_dapo_fills_its_batch_from_the_stream(toy_dir, tmp_path):
    odd = function(tmp_path, "odd", "float(ids[0] % 2)")
    dataflow = program(DAPO, toy_dir(), local_roles(toy_dir(), algorithm=NUMBERS[DAPO], rewards=[odd]), max_refills=20)
    (metrics,) = steps(dataflow, 1)
    found = plain(metrics)
    batch = dataflow.last_batch
    assert batch is not None
    assert found["dapo/refills"] > 0
    assert found["frac_reward_zero_std"] == 0.0
    assert found["dapo/prompts_drawn"] == PROMPTS + found["dapo/groups_discarded"] + found["dapo/groups_surplus"]
    for uid in batch.row("uid").unique():
        assert sorted(batch.row("scores")[batch.row("uid") == uid].tolist()) == [0.0, 1.0]


def test_dapo_compares_groups_by_the_function_that_its_settings_name(toy_dir, tmp_path):
    rewards = [function(tmp_path, "odd", "float(ids[0] % 2)"), function(tmp_path, "one", "1.0")]
    roles = local_roles(toy_dir(), algorithm=NUMBERS[DAPO], rewards=rewards)
    (metrics,) = steps(program(DAPO, toy_dir(), roles, filter_metric="one", max_refills=1), 1)
    assert metrics["dapo/groups_without_signal"].value == PROMPTS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 1.0, 0.0, -1.0]),  # a fifth of 10 tokens: 8 cost nothing, 9 a half, 10 all
        ({"overlong_penalty": 0.5}, [1.0, 1.0, 0.25, -0.5]),
        ({"overlong_buffer": 0.5}, [1.0, 0.4, -0.3, -1.0]),
        ({"overlong_buffer": 0.0}, [1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_dapo_punishes_the_last_part_of_the_longest_response(toy_dir, settings, expected):
    roles = local_roles(toy_dir())
    dataflow = DAPO({}, settings=DAPO.Settings(**settings), samples_per_prompt=SAMPLES)
    dataflow.max_response_tokens = 10
    responses = Ragged.from_rows([torch.zeros(length, dtype=torch.int64) for length in (1, 8, 9, 10)])
    rows = {"scores": torch.tensor([1.0, 1.0, 0.5, 0.0])}
    batch = BatchRef.of(Batch.of(tokens={"response_ids": responses}, rows=rows), roles.backend)
    assert dataflow.punished(batch).row("scores").tolist() == pytest.approx(expected)
    own = batch.join(Batch.of(rows={"rewards/overlong": torch.zeros(4)}))
    assert dataflow.punished(own).row("scores").tolist() == rows["scores"].tolist()


def test_pf_ppo_draws_the_same_rows_again_and_others_in_the_next_step(toy_dir):
    def drawn(seed: int, iteration: int) -> list[int]:
        dataflow = program(PFPPO, toy_dir(), local_roles(toy_dir(), algorithm=GAE), weighting="pow")
        dataflow.seed, dataflow.iteration = seed, iteration
        rows = {"scores": torch.rand(40, generator=torch.Generator().manual_seed(0)), "uid": torch.arange(40)}
        assert isinstance(dataflow, PFPPO)
        return dataflow.resampled(BatchRef.of(Batch.of(rows=rows), LOCAL)).row("uid").tolist()

    LOCAL = local_roles(toy_dir()).backend
    assert drawn(3, 5) == drawn(3, 5)
    assert drawn(3, 5) != drawn(3, 6)
    assert drawn(3, 5) != drawn(4, 5)


def test_few_prompts_drawn_often_can_be_divided_over_ranks(toy_dir):
    drawn = Sums(calculator_prompts(toy_dir())).next().select(torch.tensor([0, 0, 0, 1, 0, 0]))
    batch = BatchRef.of(drawn, local_roles(toy_dir()).backend)
    with pytest.raises(BatchError, match="cannot be divided"):
        divided(batch, 2, role="actor", minibatch_rows=3)
    parts = divided(ungrouped(batch), 2, role="actor", minibatch_rows=3).parts
    assert parts is not None and sorted(parts.rows.tolist()) == [0, 1, 2, 3, 4, 5]
    assert all(size >= 2 for size in parts.sizes)


def test_pf_ppo_learns_from_what_it_drew_and_accounts_for_all(toy_dir, tmp_path):
    roles = local_roles(toy_dir(), algorithm=GAE, rewards=[function(tmp_path, "odd", "float(ids[0] % 2)")])
    found = steps(program(PFPPO, toy_dir(), roles, weighting="pow"), 2)
    assert values(found, "pf_ppo/score/mean") == pytest.approx([1.0, 1.0], abs=1e-4)
    assert all(0.0 < fraction < 1.0 for fraction in values(found, "pf_ppo/distinct_fraction"))
    assert all(mean < 1.0 for mean in values(found, "critic/score/mean"))


def test_ppo_ptx_learns_the_texts_beside(toy_dir):
    algorithm = Algorithm(advantage="gae", pretraining_coefficient=1.0)
    dataflow = program(PPOPtx, toy_dir(), local_roles(toy_dir(), algorithm=algorithm))
    losses = values(steps(dataflow, 5), "actor/pretraining_loss")
    assert losses[-1] < losses[0] - 0.3


def test_safe_rlhf_lowers_a_cost_that_its_reward_pays_for(toy_dir, tmp_path):
    long, cost = function(tmp_path, "long", "float(len(ids))"), function(tmp_path, "tokens", "float(len(ids))")
    roles = local_roles(toy_dir(), algorithm=GAE, rewards=[long], costs=[cost])
    found = steps(program(SafeRLHF, toy_dir(), roles, cost_limit=2.0, multiplier=3.0, multiplier_rate=0.5), 12)
    costs = values(found, "safe_rlhf/cost/mean")
    assert sum(costs[-3:]) / 3 < sum(costs[:3]) / 3 - 0.5
    limits = {"start": 3.0, "limit": 2.0, "rate": 0.5, "largest": 5.0}
    expected = constraints.multipliers([[cost] for cost in costs], **limits)
    assert values(found, "safe_rlhf/multiplier") == pytest.approx(expected)


def test_two_critics_report_under_their_own_names(toy_dir, tmp_path):
    costs = [function(tmp_path, "nothing", "0.0")]
    (metrics,) = steps(program(SafeRLHF, toy_dir(), local_roles(toy_dir(), algorithm=GAE, costs=costs)), 1)
    names = ["vf_loss", "vf_explained_var", "returns/mean", "values/mean", "grad_norm", "lr"]
    assert {f"{role}/{name}" for role in ("critic", "cost_critic") for name in names} <= metrics.keys()
    assert "cost_critic/score/mean" not in metrics


def test_the_multiplier_is_part_of_what_is_resumed(toy_dir, tmp_path):
    roles = local_roles(toy_dir(), algorithm=GAE, costs=[function(tmp_path, "one", "1.0")])
    first, second = (program(SafeRLHF, toy_dir(), roles) for _ in range(2))
    steps(first, 1)
    state = first.state()
    assert isinstance(state, Mapping)
    assert state != second.state()
    second.restore(state)
    assert second.state() == state


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SafeRLHF, {"multiplier": 0.0}, "multiplier=0"),
        (SafeRLHF, {"multiplier": 9.0}, "multiplier_max=5"),
        (SafeRLHF, {"multiplier_rate": -1.0}, "multiplier_rate=-1"),
        (SafeRLHF, {"cost_limit": math.nan}, "cost_limit=nan"),
        (PFPPO, {"power": math.inf}, "power=inf"),
        (DAPO, {"max_refills": -1}, "max_refills=-1"),
        (DAPO, {"overlong_buffer": 1.5}, "overlong_buffer=1.5"),
        (DAPO, {"overlong_penalty": -1.0}, "overlong_penalty=-1"),
        (PFPPO, {"weighting": "best"}, "weighting=best"),
    ],
)
def test_settings_out_of_range_are_errors_with_a_remedy(kind: type[Dataflow], settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_settings(kind, settings)
    assert "Use" in caught.value.remedy or "Choose" in caught.value.remedy
