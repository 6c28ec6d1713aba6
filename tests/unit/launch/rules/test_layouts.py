"""A model that an engine cannot divide as asked, in the words of its own section; all of them at once."""

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.roles import plan_roles
from hybridflow.launch.rules.layouts import layout_errors
from tests.unit.config.experiments import experiment
from tests.unit.models.names.examples import geometry


def test_every_role_is_named_by_the_section_that_lays_it_out():
    settings = {
        "trainer.devices": 4,
        "reward.functions": ["exact_match"],
        "actor.engine": TrainingEngine.megatron,
        "actor.parallelism.tensor": 4,
        "critic.engine": TrainingEngine.fsdp,
        "rollout.engine": RolloutKind.vllm,
        "rollout.parallelism.tensor": 4,
    }
    config = experiment(settings)
    specs = [spec for spec in plan_roles(config, find_dataflow("ppo")) if spec.model is not None]
    known, unknown = geometry("llama"), geometry("gemma2")
    found = [error.message for error in layout_errors(config, specs, {"actor": unknown, "critic": unknown})]
    refused = ["actor.engine=megatron", "rollout.engine=vllm"]
    assert [message.partition(" divides models of")[0] for message in found] == refused
    found = [error.message for error in layout_errors(config, specs, {"actor": known, "critic": known})]
    assert found == [
        "actor.parallelism.tensor=4 does not divide the model's 2 key-value heads, with actor.engine=megatron."
    ]
