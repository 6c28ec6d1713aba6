"""The roles of reward models, and what is told of a model that is to judge."""

import logging

from transformers import DistilBertConfig, DistilBertForSequenceClassification

from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.reward_model import RewardModeling
from hybridflow.dataflows.roles import Policy, Sampler, Scorer
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.roles import RoleSpec, plan_roles
from hybridflow.launch.rules.memory import memory_phases
from hybridflow.launch.rules.models import reward_model_problems
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer
from tests.reward_models import make_decoder, make_encoder
from tests.unit.launch.plans import judged, planned

POOLS = ["trainer.devices=3", "placement.pools={main: {devices: 1}, judges: {devices: 2}}"]


class TwoJudges(Dataflow):
    """A dataflow that asks a reward model and another."""

    actor: Policy
    rollout: Sampler
    reward: Scorer
    cost: Scorer

    def step(self, prompts):
        return {}


def roles(dataflow: type[Dataflow], *words: str, name: str = "ppo") -> dict[str, RoleSpec]:
    config = compose_run(words, config_name=name).config
    return {role.name: role for role in plan_roles(config, dataflow)}


def test_a_reward_model_has_its_own_pool_engine_and_functions():
    words = ["algorithm=grpo", *POOLS, "placement.roles.reward=judges", "actor.lora.rank=4"]
    spec = roles(GRPO, *words, "reward={model: {path: judge}, microbatch_tokens: 99}")["reward"]
    assert (spec.worker_class, spec.pool, spec.is_trained) == (RewardModelWorker, "judges", False)
    assert spec.training is not None and spec.mesh is not None and spec.model is not None
    assert (spec.training.engine, spec.training.microbatch_tokens) == (TrainingEngine.fsdp, 99)
    assert spec.training.lora.rank == 0
    assert (spec.mesh.size, spec.model.path) == (2, "judge")


def test_a_further_judge_is_laid_out_as_it_says():
    role = "roles.cost={kind: reward_model, model: {path: other}, functions: [format], pool: judges}"
    words = ["algorithm=grpo", *POOLS, "reward.model.path=judge", "actor.lora.rank=4", role]
    spec = roles(TwoJudges, *words, "roles.cost={engine: megatron, parallelism: {tensor: 2}}")["cost"]
    assert spec.training is not None and spec.mesh is not None and spec.model is not None
    assert (spec.worker_class, spec.pool, spec.model.path) == (RewardModelWorker, "judges", "other")
    assert (spec.training.engine, spec.mesh.axis_size("tensor")) == (TrainingEngine.megatron, 2)
    assert spec.training.lora.rank == 0


def test_a_judge_is_trained_as_the_actor_section_says():
    words = ["actor={minibatch_size: 8, optimizer: {learning_rate: 3e-5}}"]
    spec = roles(RewardModeling, *words, name="reward_model")["reward_model"]
    assert spec.worker_class is RewardModelTrainer and spec.is_trained and spec.training is not None
    assert spec.training.optimizer.learning_rate == 3e-5
    assert spec.minibatch_rows == 16  # two rows a pair


def told(caplog, *words: str) -> list[str]:
    """What is logged and warned of when a run's reward model is judged."""
    plan = planned("algorithm=grpo", "reward.functions=[]", *words)
    with caplog.at_level(logging.INFO, logger="hybridflow.launch.rules.models"):
        advice = judged(plan, reward_model_problems)
    records = [record for record in caplog.records if record.name == "hybridflow.launch.rules.models"]
    return [*(each.message for each in advice), *(record.getMessage() for record in records)]


def test_how_a_model_will_read_is_told(caplog, tmp_path):
    (line,) = told(caplog, f"reward.model.path={make_decoder(tmp_path)}")
    assert "reads=the policy's tokens runs_on=single score=its one label" in line


def test_an_engine_that_does_nothing_and_a_length_that_may_be_too_short_are_told(caplog, tmp_path):
    encoder = make_encoder(tmp_path, positions=20)
    engine, length, line = told(caplog, f"reward.model.path={encoder}", *POOLS, "reward.engine=fsdp")
    assert engine.startswith("reward.engine=fsdp has no effect")
    assert "make 40 tokens; the model of reward reads 20 of its own" in length
    assert "runs_on=transformers" in line


def test_on_a_gpu_a_judge_of_another_family_counts_with_its_weights(tmp_path):
    encoder = make_encoder(tmp_path)
    sizes = DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64)
    sizes.num_labels = 1
    DistilBertForSequenceClassification(sizes).save_pretrained(encoder)  # names its sizes as no decoder does
    words = ["algorithm=grpo", "reward.functions=[]", f"reward.model.path={encoder}", "rollout.engine=transformers"]
    plan = planned(*words, device="cuda")
    judged(plan, reward_model_problems)
    (scoring,) = (phase for phase in memory_phases(plan, "main", device_bytes=None) if phase.name == "running reward")
    assert scoring.parts["weights of reward"] == (encoder / "model.safetensors").stat().st_size
