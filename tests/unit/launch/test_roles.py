"""From the roles a dataflow names to workers, models and pools."""

from dataclasses import dataclass
from typing import Any

import pytest

from hybridflow.config.derived import pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.dpo import DPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.kto import KTO
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.reward_model import RewardModeling
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer, ValueFunction
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.dataflow import make_settings
from hybridflow.launch.plan.roles import RoleSpec, plan_roles, training_temperature
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer

PLACES = ["trainer.devices=3", "placement.pools={main: {devices: 1}, judges: {devices: 2}}"]


class TwoJudges(Dataflow):
    """A dataflow with roles of its own."""

    actor: Policy
    rollout: Sampler
    reward: Scorer
    judge: Scorer
    teacher: FrozenModel | None

    def step(self, prompts):
        return {}


class TwoCritics(PPO):
    """A second critic, of no costs."""

    second: ValueFunction


class Misnamed(Dataflow):
    """A role that no configuration describes."""

    policy: Policy

    def step(self, prompts):
        return {}


def configured(*overrides: str, name: str = "ppo") -> Experiment:
    return compose_run(overrides, config_name=name).config


def planned(dataflow: type[Dataflow], *overrides: str, name: str = "ppo") -> dict[str, RoleSpec]:
    settings = make_settings(dataflow, {})
    return {spec.name: spec for spec in plan_roles(configured(*overrides, name=name), dataflow, settings)}


def told(spec: RoleSpec, name: str) -> Any:
    """The argument of a role's worker."""
    return vars(spec.arguments)[name]


def test_the_rollout_is_part_of_the_actor_and_grpo_has_no_critic():
    plan = planned(PPO)
    assert list(plan) == ["actor", "critic", "reward"]
    assert told(plan["actor"], "rollout") is not None
    assert [spec.name for spec in plan.values() if spec.is_trained] == ["actor", "critic"]
    assert list(planned(GRPO, "algorithm=grpo")) == ["actor", "reward"]


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_reference_is_there_when_the_divergence_counts_and_is_a_policy_without_its_adapter(placement):
    assert "reference" not in planned(PPO)
    divergence = f"algorithm.kl.placement={placement}"
    plan = planned(PPO, divergence, "rollout.sampling.temperature=0.7")
    assert not plan["reference"].is_trained
    assert plan["reference"].model == plan["actor"].model
    assert told(plan["actor"], "setup").temperature == told(plan["reference"], "temperature") == 0.7
    view = planned(PPO, "actor.lora.rank=4", divergence)["reference"]
    assert view.view_of == "actor"
    assert view.model is None and view.training is None and not view.is_trained


@pytest.mark.parametrize(
    "own",
    [
        ["roles.reference.kind=reference", "roles.reference.model.path=/other"],
        ["trainer.devices=2", "placement.pools={a: {devices: 1}, b: {devices: 1}}", "placement.roles.reference=b"],
    ],
)
def test_a_reference_with_a_model_or_a_pool_of_its_own_is_loaded_and_has_no_adapter(own):
    reference = planned(PPO, "actor.lora.rank=4", "algorithm.kl.placement=loss", *own)["reference"]
    assert reference.view_of is None and reference.worker_class is ReferenceWorker
    assert reference.training.lora.rank == 0


class Precomputed(DPO):
    """Its reference is precomputed by default."""

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        precompute_reference: bool = True


def test_a_class_decides_from_its_settings_whether_it_needs_a_reference():
    assert "reference" in planned(DPO, name="dpo") and "reference" not in planned(Precomputed, name="dpo")


def test_imitation_has_a_rollout_only_to_be_evaluated():
    assert list(planned(SFT, name="sft")) == ["actor", "reward"]
    unwatched = planned(SFT, "trainer.eval_every=0", name="sft")
    assert list(unwatched) == ["actor"]
    assert told(unwatched["actor"], "rollout") is None


def test_minibatches_count_samples_or_demonstrations_and_optimizer_steps_those_of_the_whole_run():
    sizes = ["actor.minibatch_size=8", "rollout.samples_per_prompt=3"]
    assert told(planned(PPO, *sizes)["actor"], "setup").minibatch_sequences == 24
    assert told(planned(SFT, *sizes, name="sft")["actor"], "setup").minibatch_sequences == 8
    overrides = ["trainer.total_steps=10", "data.batch_size=64", "critic.minibatch_size=16", "critic.epochs=2"]
    assert told(planned(PPO, *overrides)["critic"], "setup").total_optimizer_steps == 80


class Judged(DPO):
    """Pairs that the policy itself samples in each step."""

    rollout: Sampler


@pytest.mark.parametrize(
    ("dataflow", "name", "expected"),
    [
        *[(PPO, "ppo", 0.7), (GRPO, "ppo", 0.7), (SafeRLHF, "ppo", 0.7), (Judged, "dpo", 0.7)],
        *[(SFT, "sft", 1.0), (DPO, "dpo", 1.0), (KTO, "kto", 1.0)],
    ],
)
def test_the_policy_and_its_reference_have_the_temperature_of_the_samples_that_it_learns_from(dataflow, name, expected):
    config = configured("rollout.sampling.temperature=0.7", "rollout.eval_sampling.temperature=0.5", name=name)
    assert training_temperature(config, dataflow) == expected


def test_a_role_has_the_runs_model_unless_it_names_its_own():
    models = planned(PPO, "critic.model.path=/own", "critic.model.pad_token=x")
    assert (models["actor"].model.path, models["critic"].model.path) == ("builtin:calculator", "/own")
    assert models["critic"].model.pad_token == "x"


def test_a_reward_model_has_its_own_pool_engine_and_functions():
    words = [*PLACES, "placement.roles.reward=judges", "actor.lora.rank=4"]
    spec = planned(GRPO, *words, "reward={model: {path: judge}, microbatch_tokens: 99}")["reward"]
    assert (spec.worker_class, spec.pool, spec.is_trained) == (RewardModelWorker, "judges", False)
    assert spec.training is not None and spec.model is not None
    assert (spec.training.engine, spec.training.microbatch_tokens) == (TrainingEngine.fsdp, 99)
    assert (spec.training.lora.rank, spec.mesh.size, spec.model.path) == (0, 2, "judge")


def test_a_further_reward_model_is_laid_out_as_it_says():
    role = "roles.judge={kind: reward_model, model: {path: other}, functions: [format], pool: judges}"
    layout = "roles.judge={engine: megatron, parallelism: {tensor: 2}}"
    spec = planned(TwoJudges, *PLACES, "reward.model.path=judge", "actor.lora.rank=4", role, layout)["judge"]
    assert spec.training is not None and spec.model is not None
    assert (spec.worker_class, spec.pool, spec.model.path) == (RewardModelWorker, "judges", "other")
    assert (spec.training.engine, spec.mesh.axis_size("tensor")) == (TrainingEngine.megatron, 2)
    assert spec.training.lora.rank == 0


def test_a_reward_model_is_trained_as_the_actor_section_says():
    words = ["actor={minibatch_size: 8, optimizer: {learning_rate: 3e-5}}"]
    spec = planned(RewardModeling, *words, name="reward_model")["reward_model"]
    assert spec.worker_class is RewardModelTrainer and spec.is_trained and spec.training is not None
    assert (spec.training.optimizer.learning_rate, spec.minibatch_rows) == (3e-5, 16)  # two rows per pair


def test_further_roles_are_described_by_their_name_and_optional_ones_may_be_left_out():
    judge, teacher = "roles.judge={kind: reward_function, functions: [format]}", "roles.teacher.kind=reference"
    plan = planned(TwoJudges, judge, teacher, "roles.teacher.model.path=/teacher")
    assert told(plan["judge"], "reward").functions == ["format"]
    assert told(plan["reward"], "reward").functions == ["exact_match"]
    assert plan["teacher"].model.path == "/teacher"
    assert not plan["judge"].is_trained
    assert "teacher" not in planned(TwoJudges, judge)


def test_roles_live_in_their_own_pool_else_in_that_of_placement_else_in_the_first():
    overrides = ["trainer.devices=2", "placement.pools={a: {devices: 1}, b: {devices: 1}}", "placement.roles.critic=b"]
    pools = {name: spec.pool for name, spec in planned(PPO, *overrides).items()}
    assert pools == {"actor": "a", "critic": "b", "reward": "a"}
    assert pool_sizes(configured(*overrides)) == {"a": 1, "b": 1}
    assert pool_sizes(configured()) == {"main": 1}
    judge = "roles.judge={kind: reward_function, functions: [format], pool: b}"
    assert planned(TwoJudges, *overrides[:2], judge)["judge"].pool == "b"


@pytest.mark.parametrize(
    ("dataflow", "overrides", "message", "remedy"),
    [
        (PPO, ["roles.judge.kind=reference"], "roles.judge is not a role of dataflow=ppo", "actor, critic, rollout"),
        (TwoJudges, [], "'judge: Scorer' that the configuration does not describe", "roles.judge.kind=..."),
        (TwoJudges, ["roles.judge.kind=reference"], "the dataflow wants Scorer", "roles.judge.kind=reward_function"),
        (TwoJudges, ["roles.judge.kind=reward_function"], "roles.judge.functions is empty", "[exact_match]"),
        (SafeRLHF, ["dataflow=safe_rlhf"], "'cost: Scorer' that the configuration", "Use algorithm=safe_rlhf"),
        (Misnamed, [f"dataflow={__file__}:Misnamed"], "'policy: Policy' that the config", "Call it 'actor'"),
        (PPO, ["roles.actor.kind=reference"], "the dataflow wants Policy", "Leave roles.actor out"),
    ],
)
def test_roles_that_do_not_fit_the_dataflow_are_named(dataflow, overrides, message, remedy):
    with pytest.raises(ConfigError) as caught:
        planned(dataflow, *overrides)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_the_cost_critic_is_trained_as_the_critic_is_and_pays_the_divergence_as_a_cost():
    kl = ["algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.2", "critic.model.path=/own"]
    plan = planned(SafeRLHF, "algorithm=safe_rlhf", *kl)
    critic, second = plan["critic"], plan["cost_critic"]
    assert second.is_trained
    assert (second.worker_class, second.training, second.model) == (critic.worker_class, critic.training, critic.model)
    assert second.minibatch_rows == critic.minibatch_rows
    assert told(plan["critic"], "algorithm").kl.coefficient == 0.2
    assert told(plan["cost_critic"], "algorithm").kl.coefficient == -0.2


def test_a_further_critic_may_have_a_model_of_its_own_and_pays_for_no_divergence():
    kl = ["algorithm.kl.placement=reward", "critic.model.path=/critic"]
    plan = planned(TwoCritics, "roles.second.kind=critic", "roles.second.model.path=/second", *kl)
    assert (plan["critic"].model.path, plan["second"].model.path) == ("/critic", "/second")
    assert told(plan["second"], "algorithm").kl.placement.name == "none"
