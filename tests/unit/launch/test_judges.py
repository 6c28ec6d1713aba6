"""The roles of reward models, and what is told of a model that is to judge."""

import logging

from transformers import DistilBertConfig, DistilBertForSequenceClassification

from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.reward_model import RewardModeling
from hybridflow.dataflows.roles import Policy, Sampler, Scorer
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.device_defaults import resolved
from hybridflow.launch.plan.roles import RoleSpec, plan_roles
from hybridflow.launch.rules.memory_estimate import memory_phases
from hybridflow.launch.rules.preflight import check_run
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer
from tests.judges import make_decoder, make_encoder

POOLS = ["trainer.devices=3", "placement.pools={main: {devices: 1}, judges: {devices: 2}}"]


class TwoJudges(Dataflow):
    """A dataflow that asks a reward model and another."""

    actor: Policy
    rollout: Sampler
    reward: Scorer
    cost: Scorer

    def step(self, prompts):
        return {}


def planned(dataflow: type[Dataflow], *words: str, name: str = "ppo") -> dict[str, RoleSpec]:
    config = compose_run(words, config_name=name).config
    return {spec.name: spec for spec in plan_roles(config, dataflow)}


def test_a_reward_model_has_its_own_pool_engine_and_functions():
    words = ["algorithm=grpo", *POOLS, "placement.roles.reward=judges", "actor.lora.rank=4"]
    spec = planned(GRPO, *words, "reward={model: {path: judge}, microbatch_tokens: 99}")["reward"]
    assert (spec.worker_class, spec.pool, spec.is_trained) == (RewardModelWorker, "judges", False)
    assert spec.training is not None and spec.mesh is not None and spec.model is not None
    assert (spec.training.engine, spec.training.microbatch_tokens) == (TrainingEngine.fsdp, 99)
    assert spec.training.lora.rank == 0
    assert (spec.mesh.size, spec.model.path) == (2, "judge")


def test_a_further_judge_is_laid_out_as_it_says():
    role = "roles.cost={kind: reward_model, model: {path: other}, functions: [format], pool: judges}"
    words = ["algorithm=grpo", *POOLS, "reward.model.path=judge", "actor.lora.rank=4", role]
    spec = planned(TwoJudges, *words, "roles.cost={engine: megatron, parallelism: {tensor: 2}}")["cost"]
    assert spec.training is not None and spec.mesh is not None and spec.model is not None
    assert (spec.worker_class, spec.pool, spec.model.path) == (RewardModelWorker, "judges", "other")
    assert (spec.training.engine, spec.mesh.axis_size("tensor")) == (TrainingEngine.megatron, 2)
    assert spec.training.lora.rank == 0


def test_a_judge_is_trained_as_the_actor_section_says():
    words = ["actor={minibatch_size: 8, optimizer: {learning_rate: 3e-5}}"]
    spec = planned(RewardModeling, *words, name="reward_model")["reward_model"]
    assert spec.worker_class is RewardModelTrainer and spec.is_trained and spec.training is not None
    assert spec.training.optimizer.learning_rate == 3e-5
    assert spec.minibatch_rows == 16  # two rows a pair


def told(caplog, *words: str) -> list[str]:
    """What is logged when a run's models are looked at."""
    config = compose_run(["algorithm=grpo", "reward.functions=[]", *words], config_name="ppo").config
    with caplog.at_level(logging.INFO, logger="hybridflow.launch.rules.reward_models"):
        check_run(config, plan_roles(config, GRPO))
    return [record.getMessage() for record in caplog.records if record.name == "hybridflow.launch.rules.reward_models"]


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
    config = resolved(compose_run(words, config_name="ppo").config, "cuda")
    specs = plan_roles(config, GRPO)
    check_run(config, specs, "cuda")
    phases = memory_phases(config, specs, "main", device_bytes=None, whole=["reward"])
    (judging,) = (phase for phase in phases if phase.name == "running reward")
    assert judging.parts["weights of reward"] == (encoder / "model.safetensors").stat().st_size
