"""A model that an engine cannot divide as asked, in the words of its own section; all of them at once."""

import json

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.launch.rules.layouts import layout_problems
from tests.unit.config.experiments import experiment
from tests.unit.launch.plans import plan_of

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


def test_every_role_is_named_by_the_section_that_lays_it_out(tmp_path):
    settings = {
        "trainer.devices": 4,
        "model.path": str(tmp_path),
        "reward.functions": ["exact_match"],
        "actor.engine": TrainingEngine.megatron,
        "actor.parallelism.tensor": 4,
        "critic.engine": TrainingEngine.fsdp,
        "rollout.engine": RolloutKind.vllm,
        "rollout.parallelism.tensor": 4,
    }

    def found(model_type: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES}))
        return [error.message for error in layout_problems(plan_of(experiment(settings)))]

    assert [message.partition(" divides models of")[0] for message in found("gemma2")] == [
        "actor.engine=megatron",
        "rollout.engine=vllm",
    ]
    assert found("llama") == [
        "actor.parallelism.tensor=4 does not divide the model's 2 key-value heads, with actor.engine=megatron."
    ]
