"""What a user asked for and nothing in the run reads is told; what the package's own files say is not."""

import logging

import pytest

from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.roles import plan_roles
from hybridflow.launch.rules.unused_settings import warn_of_unread

OWN_FLOW = """
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Policy


class Own(Dataflow):
    data = "preferences"
    actor: Policy

    def step(self, prompts):
        return {}
"""
UNREAD = [
    ("sft", "algorithm.kl.placement=loss", "dataflow=sft imitates"),
    ("sft", "algorithm.preference.beta=0.5", "dataflow=sft imitates"),
    ("sft", "algorithm.advantage=grpo", "dataflow=sft imitates"),
    ("sft", "rollout.sampling.temperature=0.5", "rollout.eval_sampling"),
    ("sft", "rollout.samples_per_prompt=8", "rollout.eval_samples_per_prompt"),
    ("sft", "critic.optimizer.learning_rate=0.01", "has no critic"),
    ("reward_model", "algorithm.preference.loss=ipo", "algorithm.preference.center_coefficient alone"),
    ("reward_model", "algorithm.gamma=0.9", "algorithm.preference.center_coefficient alone"),
    ("reward_model", "rollout.eval_sampling.temperature=0.5", "generates nothing"),
    ("reward_model", "reward.functions=[exact_match]", "nothing in this run is judged"),
    ("dpo", "algorithm.clip_high=0.3", "reads algorithm.preference and algorithm.loss_settings alone"),
    ("dpo", "algorithm.kl.coefficient=0.5", "reads algorithm.preference and algorithm.loss_settings alone"),
    ("dpo", "algorithm.preference.center_coefficient=0.5", "for reward models"),
    ("dpo", "algorithm.preference.desirable_weight=2.0", "algorithm.preference.loss=sigmoid does not read it"),
    ("dpo algorithm.preference.loss=orpo", "algorithm.preference.margin=1.0", "loss=orpo does not read it"),
    ("dpo algorithm.preference.loss=simpo", "algorithm.preference.reference_free=true", "compares with no reference"),
    ("kto", "algorithm.preference.label_smoothing=0.2", "algorithm.preference.loss=kto does not read it"),
    ("ppo", "algorithm.preference.beta=0.5", "not from preferences"),
    ("ppo", "algorithm.kl.coefficient=0.5", "algorithm.kl.placement=none"),
    ("ppo algorithm.kl.placement=loss", "algorithm.kl.horizon=20000", "algorithm.kl.target=null"),
    ("ppo algorithm.kl.placement=reward", "algorithm.kl.allow_k1_loss=true", "no divergence in the loss"),
    ("ppo", "algorithm.correction.upper=3.0", "algorithm.correction.weights=none"),
    ("ppo", "algorithm.correction.reject_upper=3.0", "algorithm.correction.reject=none"),
    ("ppo", "critic.parallelism.sequence_parallel=true", "critic.engine=auto"),
    ("ppo", "rollout.vllm.kv_cache_mb=64", "rollout.engine=transformers"),
    ("ppo", "reward.model_weight=2.0", "no reward model"),
    ("ppo", "actor.lora.alpha=8.0", "actor.lora.rank=0"),
    ("ppo algorithm=grpo", "algorithm.lam=0.9", "algorithm.advantage=grpo does not read it"),
    ("ppo algorithm=grpo", "algorithm.value_clip=0.5", "has no critic"),
    ("ppo algorithm=grpo", "critic.epochs=2", "has no critic"),
    ("ppo algorithm=grpo placement.pools.main.devices=1", "placement.roles.critic=main", "no role 'critic'"),
    ("ppo algorithm=gspo", "algorithm.dual_clip=3.0", "algorithm.policy_loss=gspo does not read it"),
]
READ = [
    "ppo algorithm.lam=0.9 algorithm.dual_clip=3 critic.epochs=2 rollout.samples_per_prompt=2",
    "ppo placement.pools.main.devices=1 placement.roles={critic: main, rollout: main}",
    "ppo algorithm.kl={placement: reward, coefficient: 0.1, estimator: k3, target: 0.1, horizon: 20000}",
    "ppo algorithm.correction={weights: token, upper: 3, reject: sequence, reject_upper: 4}",
    "ppo algorithm=grpo rollout.sampling.temperature=0.8 reward.error_budget=2",
    "sft rollout.eval_sampling.temperature=0.5 rollout.samples_per_prompt=1 algorithm.kl.placement=none",
    "dpo algorithm.preference={label_smoothing: 0.2, margin: 1, beta: 0.5, imitation: 0.1, reference_free: true}",
    "kto algorithm.preference={desirable_weight: 2, undesirable_weight: 0.5, imitation: 0.1}",
    "reward_model algorithm.preference.center_coefficient=0.01",
]
COMMANDS = ["ppo", "sft", "dpo", "dpo algorithm.preference.loss=orpo", "kto", "reward_model", "ppo algorithm=dapo"]


def told(caplog, composed: Composed) -> list[str]:
    """The lines about settings without effect."""
    dataflow = find_dataflow(composed.config.dataflow)
    specs = plan_roles(composed.config, dataflow)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        warn_of_unread(composed, dataflow, specs)
    return [record.getMessage() for record in caplog.records]


def composed(command: str) -> Composed:
    """A trainer's name and settings, which begin with words alone."""
    trainer, *settings = command.replace(": ", ":").replace(", ", ",").split()
    return compose_run(settings, config_name=trainer)


@pytest.mark.parametrize(("command", "setting", "why"), UNREAD, ids=[f"{c} {s}" for c, s, _ in UNREAD])
def test_a_setting_that_nothing_reads_is_told_with_the_reason(caplog, command, setting, why):
    (line,) = told(caplog, composed(f"{command} {setting}"))
    assert line.startswith(f"{setting} is without effect: ")
    assert why in line


@pytest.mark.parametrize("command", READ)
def test_a_setting_that_is_read_is_not_told(caplog, command):
    assert told(caplog, composed(command)) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_package_says_itself_is_not_told(caplog, command):
    assert told(caplog, composed(command)) == []


def test_settings_of_one_reason_share_a_line_and_none_is_told_twice(caplog):
    command = "sft algorithm.gamma=0.9 algorithm.kl.placement=loss algorithm.kl.coefficient=0.5 critic.epochs=2"
    lines = told(caplog, composed(command))
    assert lines == [
        "critic.epochs=2 is without effect: dataflow=sft has no critic",
        "algorithm.gamma=0.9, algorithm.kl.coefficient=0.5, algorithm.kl.placement=loss are without effect:"
        " dataflow=sft imitates, and reads nothing of `algorithm`",
    ]


def test_a_users_file_is_asked_and_the_package_that_it_builds_on_is_not(caplog, tmp_path):
    (tmp_path / "team.yaml").write_text("defaults: [dpo, _self_]\nalgorithm: {kl: {placement: loss}}\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text("# @package _global_\nrollout: {vllm: {kv_cache_mb: 64}}\n")
    (tmp_path / "run.yaml").write_text("defaults: [team, algorithm: mine, _self_]\nrollout: {samples_per_prompt: 8}\n")
    lines = told(caplog, compose_run(["algorithm.gamma=0.5"], config_name="run", config_dir=tmp_path))
    assert [line.partition(" is ")[0] for line in lines] == [
        "rollout.samples_per_prompt=8",
        "rollout.vllm.kv_cache_mb=64",
        "algorithm.gamma=0.5, algorithm.kl.placement=loss are without effect: dataflow=dpo reads"
        " algorithm.preference and algorithm.loss_settings alone",
    ]


def test_of_a_dataflow_of_ones_own_only_roles_are_known(caplog, tmp_path):
    (tmp_path / "own.py").write_text(OWN_FLOW)
    settings = ["algorithm.preference.beta=0.5", "critic.epochs=2"]
    lines = told(caplog, compose_run([f"dataflow={tmp_path}/own.py:Own", *settings], config_name="ppo"))
    assert [line.partition(" is ")[0] for line in lines] == ["critic.epochs=2"]
