"""Warnings and log lines about the model of a reward."""

import logging

from transformers import DistilBertConfig, DistilBertForSequenceClassification

from hybridflow.errors import Problems
from hybridflow.launch.plan.data import RunData
from hybridflow.launch.rules.memory import memory_phases
from hybridflow.launch.rules.models import reward_model_problems, reward_problems
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import load_tokenizer
from tests.reward_models import make_decoder, make_encoder
from tests.unit.launch.plans import judged, planned

POOLS = ["trainer.devices=3", "placement.pools={main: {devices: 1}, judges: {devices: 2}}"]


def told(caplog, *words: str) -> list[str]:
    """What is logged and warned of when a run's reward model is judged."""
    plan = planned("algorithm=grpo", "reward.functions=[]", *words)
    with caplog.at_level(logging.INFO, logger="hybridflow.launch.rules.models"):
        advice = judged(plan, reward_model_problems)
    records = [record for record in caplog.records if record.name == "hybridflow.launch.rules.models"]
    return [*(each.message for each in advice), *(record.getMessage() for record in records)]


def test_every_function_that_cannot_be_called_is_told(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def needs(prompts, completions, level): return 0\n")
    words = [f"reward.functions=[gsm9k,{file}:nedds,{file}:needs,nope.py:f]", "reward.settings={x: {}, y: {}}"]
    tokenizer = load_tokenizer(resolve_model_path("builtin:calculator"), pad_token=None)
    found, data = (
        Problems(collects=True),
        RunData({}, None, None, tokenizer, {"data.train_files": ["prompt", "answer"]}),
    )
    found.check([reward_problems], planned("algorithm=grpo", *words), data)
    told = ("gsm9k", "'nedds'", "there is no file", "'level'", "settings.x", "settings.y")
    for error, part in zip(found.found, told, strict=True):
        assert part in error.message


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
