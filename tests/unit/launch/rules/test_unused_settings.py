"""Settings of the user that nothing in the run reads are warned of; those of the package's own files are not."""

import pytest

from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.plan.plan import plan_run
from hybridflow.launch.rules.unused_settings import unused_settings
from tests.unit.launch.plans import judged

OWN_FLOW = """
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Policy


class Own(Dataflow):
    data = "preferences"
    actor: Policy

    def step(self, prompts):
        return {}
"""
UNUSED = [
    ("sft", "algorithm.kl.placement=loss", "dataflow=sft is supervised"),
    ("sft", "algorithm.preference.beta=0.5", "dataflow=sft is supervised"),
    ("sft", "algorithm.advantage=grpo", "dataflow=sft is supervised"),
    ("sft", "rollout.sampling.temperature=0.5", "rollout.eval_sampling"),
    ("sft", "rollout.samples_per_prompt=8", "rollout.eval_samples_per_prompt"),
    ("sft", "critic.optimizer.learning_rate=0.01", "has no critic"),
    ("reward_model", "algorithm.preference.loss=ipo", "reads only algorithm.preference.center_coefficient"),
    ("reward_model", "algorithm.gamma=0.9", "reads only algorithm.preference.center_coefficient"),
    ("reward_model", "rollout.eval_sampling.temperature=0.5", "generates nothing"),
    ("reward_model", "reward.functions=[exact_match]", "scores no responses"),
    ("dpo", "algorithm.clip_high=0.3", "reads only algorithm.preference and algorithm.loss_settings"),
    ("dpo", "algorithm.kl.coefficient=0.5", "reads only algorithm.preference and algorithm.loss_settings"),
    ("dpo", "algorithm.preference.center_coefficient=0.5", "for reward models"),
    ("dpo", "algorithm.preference.desirable_weight=2.0", "algorithm.preference.loss=sigmoid does not read it"),
    ("dpo algorithm.preference.loss=orpo", "algorithm.preference.margin=1.0", "loss=orpo does not read it"),
    ("dpo algorithm.preference.loss=simpo", "algorithm.preference.reference_free=true", "uses no reference model"),
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
    ("ppo", "reward.offload_parameters=true", "no reward model"),
    ("ppo", "actor.lora.alpha=8.0", "actor.lora.rank=0"),
    ("ppo algorithm=grpo", "algorithm.lam=0.9", "algorithm.advantage=grpo does not read it"),
    ("ppo algorithm=grpo", "algorithm.value_clip=0.5", "has no critic"),
    ("ppo algorithm=grpo", "critic.epochs=2", "has no critic"),
    ("ppo algorithm=grpo placement.pools.main.devices=1", "placement.roles.critic=main", "no role 'critic'"),
    ("ppo algorithm=gspo", "algorithm.dual_clip=3.0", "algorithm.policy_loss=gspo does not read it"),
    ("ppo", "trainer.elastic.max_devices=8", "trainer.elastic.min_devices=null"),
    ("ppo trainer.backend=ray", "trainer.elastic.min_devices=1", "the Ray that the run starts"),
    ("ppo", "trainer.spare_processes=1", "trainer.backend=local has no worker processes"),
    ("ppo trainer={backend: ray, max_faults: 0}", "trainer.spare_processes=1", "trainer.max_faults=0"),
]
READ = [
    "ppo algorithm.lam=0.9 algorithm.dual_clip=3 critic.epochs=2 rollout.samples_per_prompt=2",
    "ppo placement.pools.main.devices=1 placement.roles={critic: main, rollout: main}",
    "ppo algorithm.kl={placement: reward, coefficient: 0.1, estimator: k3, target: 0.1, horizon: 20000}",
    "ppo trainer={backend: ray, spare_processes: 0}",
    "ppo algorithm.correction={weights: token, upper: 3, reject: sequence, reject_upper: 4}",
    "ppo algorithm=grpo rollout.sampling.temperature=0.8 reward.error_budget=2",
    "sft rollout.eval_sampling.temperature=0.5 rollout.samples_per_prompt=1 algorithm.kl.placement=none",
    "dpo algorithm.preference={label_smoothing: 0.2, margin: 1, beta: 0.5, imitation: 0.1, reference_free: true}",
    "kto algorithm.preference={desirable_weight: 2, undesirable_weight: 0.5, imitation: 0.1}",
    "reward_model algorithm.preference.center_coefficient=0.01",
    *["ppo", "sft", "dpo", "dpo algorithm.preference.loss=orpo", "kto", "reward_model", "ppo algorithm=dapo"],
]


def warnings(composed: Composed) -> list[str]:
    """The warnings of settings without effect."""
    return [advice.message for advice in judged(plan_run(composed, device="cpu"), unused_settings)]


def composed(command: str) -> Composed:
    """A trainer's name and settings, which begin with words alone."""
    trainer, *settings = command.replace(": ", ":").replace(", ", ",").split()
    return compose_run(settings, config_name=trainer)


@pytest.mark.parametrize(("command", "setting", "why"), UNUSED, ids=[f"{c} {s}" for c, s, _ in UNUSED])
def test_a_setting_that_nothing_reads_is_told_with_the_reason(command, setting, why):
    (line,) = warnings(composed(f"{command} {setting}"))
    assert line.startswith(f"{setting} has no effect: ")
    assert why in line


@pytest.mark.parametrize("command", READ)
def test_settings_that_are_read_and_those_of_the_package_are_not_warned_of(command):
    assert warnings(composed(command)) == []


def test_settings_of_one_reason_share_a_line_and_none_is_told_twice():
    command = "sft algorithm.gamma=0.9 algorithm.kl.placement=loss algorithm.kl.coefficient=0.5 critic.epochs=2"
    lines = warnings(composed(command))
    assert lines == [
        "critic.epochs=2 has no effect: dataflow=sft has no critic.",
        "algorithm.gamma=0.9, algorithm.kl.coefficient=0.5, algorithm.kl.placement=loss have no effect:"
        " dataflow=sft is supervised and reads nothing of `algorithm`.",
    ]


def test_a_users_file_is_asked_and_the_package_that_it_builds_on_is_not(tmp_path):
    (tmp_path / "team.yaml").write_text("defaults: [dpo, _self_]\nalgorithm: {kl: {placement: loss}}\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text("# @package _global_\nrollout: {vllm: {kv_cache_mb: 64}}\n")
    (tmp_path / "run.yaml").write_text("defaults: [team, algorithm: mine, _self_]\nrollout: {samples_per_prompt: 8}\n")
    lines = warnings(compose_run(["algorithm.gamma=0.5"], config_name="run", config_dir=tmp_path))
    assert [line.partition(" has ")[0] for line in lines] == [
        "rollout.samples_per_prompt=8",
        "rollout.vllm.kv_cache_mb=64",
        "algorithm.gamma=0.5, algorithm.kl.placement=loss have no effect: dataflow=dpo reads only"
        " algorithm.preference and algorithm.loss_settings.",
    ]


def test_of_a_dataflow_of_ones_own_only_roles_are_known(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FLOW)
    settings = ["algorithm.preference.beta=0.5", "critic.epochs=2"]
    lines = warnings(compose_run([f"dataflow={tmp_path}/own.py:Own", *settings], config_name="ppo"))
    assert [line.partition(" has ")[0] for line in lines] == ["critic.epochs=2"]
