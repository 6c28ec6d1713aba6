"""What is particular to the transformers engine; what it shares with vLLM is in tests/parity/test_rollout_parity.py."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.transformers import decode
from hybridflow.engines.rollout.transformers import engine as engine_module
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.engines.rollout.transformers.fixed import FixedMemory
from hybridflow.engines.rollout.transformers.graphs import run_eagerly
from hybridflow.errors import EngineError
from tests.oracles.training import response_logprobs, rows_of
from tests.toys import toy_model
from tests.unit.engines.rollout.rows import UNEQUAL, greedy_answers, prompt_rows, responses

GREEDY = Sampling(temperature=0.0)
EXACT = 1e-5
"""float32: padded and batched against alone and whole; tokens differ by 1e-1 and more."""


def engine_of(model: PreTrainedModel, *, max_sequences: int = 64, ends: tuple[int, ...] = ()) -> TransformersEngine:
    return TransformersEngine(model, max_sequences=max_sequences, eos_token_ids=ends)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *(
            (architecture, {"tie_word_embeddings": tied})
            for architecture in ("qwen2", "qwen3")
            for tied in (False, True)
        ),
        ("mistral", {"sliding_window": 4}),
    ],
)
def test_other_architectures_answer_as_transformers_does(architecture, settings):
    model = toy_model(architecture, **settings)
    expected = greedy_answers(model, prompt_rows(), tokens=12)
    found = engine_of(model).generate(prompt_rows(), GREEDY, max_response_tokens=12, seed=0)
    assert responses(found) == expected


def test_bfloat16_gives_the_probabilities_of_its_own_forward_pass():
    model = toy_model("llama").bfloat16()
    prompts = prompt_rows(samples=2)
    batch = engine_of(model).generate(prompts, Sampling(), max_response_tokens=8, seed=0)
    for row in rows_of(prompts.join(batch)):
        expected, _ = response_logprobs(model, row, 1.0)
        # bfloat16 keeps 8 bits: logits near 8 are off by 1/32, through two layers.
        assert torch.allclose(row["rollout_logprobs"], expected, atol=0.1)


@pytest.mark.parametrize("max_sequences", [1, 3, 5, 100])
def test_samples_do_not_depend_on_how_many_rows_run_at_once(max_sequences):
    prompts = prompt_rows(samples=3)
    whole = engine_of(toy_model("llama"), ends=(1, 9)).generate(prompts, Sampling(), max_response_tokens=10, seed=4)
    parts = engine_of(toy_model("llama"), ends=(1, 9), max_sequences=max_sequences).generate(
        prompts, Sampling(), max_response_tokens=10, seed=4
    )
    assert responses(parts) == responses(whole)
    difference = parts.tokens("rollout_logprobs").values - whole.tokens("rollout_logprobs").values
    assert float(difference.abs().max()) < EXACT


def test_rows_that_wait_for_a_fixed_memory_start_together(monkeypatch):
    expected = engine_of(toy_model("llama")).generate(prompt_rows(), Sampling(), max_response_tokens=8, seed=4)
    # As on a GPU, but without graphs.
    monkeypatch.setattr(engine_module, "_fixed_memory", lambda model: FixedMemory(model, lambda: run_eagerly))
    engine, parts = engine_of(toy_model("llama"), max_sequences=4), []
    for row in range(len(UNEQUAL)):
        engine.submit(prompt_rows().slice(row, row + 1), Sampling(), max_response_tokens=8, seed=4)
        if row == 0:
            engine.poll(max_tokens=1)
    while engine.num_running:
        parts.append(engine.poll())
    assert [len(part) for part in parts] == [1, 4, 1]
    assert [row for part in parts for row in responses(part)] == responses(expected)


def test_new_rows_start_after_interrupted_ones_in_a_fixed_memory(monkeypatch):
    sampling = Sampling(ignore_eos=True)
    expected = engine_of(toy_model("llama")).generate(prompt_rows(), sampling, max_response_tokens=12, seed=4)
    monkeypatch.setattr(engine_module, "_fixed_memory", lambda model: FixedMemory(model, lambda: run_eagerly))
    engine, parts = engine_of(toy_model("llama")), []
    engine.submit(prompt_rows().slice(0, 2), sampling, max_response_tokens=12, seed=4)
    assert not len(engine.poll(max_tokens=5))
    engine.pause(keep_cache=False)
    engine.resume(version=1)
    engine.submit(prompt_rows().slice(2, len(UNEQUAL)), sampling, max_response_tokens=12, seed=4)
    while engine.num_running:
        parts.append(engine.poll())
    assert [row for part in parts for row in responses(part)] == responses(expected)


def test_the_slots_of_experts_have_their_names_in_a_checkpoint(tmp_path):
    model = toy_model("qwen3_moe")
    slots = engine_of(model).weight_slots()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(slots) == set(saved)
    assert all(torch.equal(slots[name].tensor, saved[name]) for name in saved)


def test_layers_without_keys_and_values_are_refused():
    model = toy_model("qwen3", layer_types=["full_attention", "full_attention"])
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(EngineError, match=r"linear_attention.*rollout\.engine=vllm"):
        engine_of(model)


def test_weights_and_responses_can_take_part_in_training_afterwards():
    model = toy_model("llama")
    batch = engine_of(model).generate(prompt_rows(), Sampling(), max_response_tokens=3, seed=0)
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    columns = [*batch.row_columns.values(), *(ragged.values for ragged in batch.token_columns.values())]
    assert not any(column.is_inference() for column in columns)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [Sampling(), GREEDY, Sampling(top_k=5, top_p=0.9)], ids=["sampled", "greedy", "restricted"]
)
def test_a_model_whose_logits_are_not_finite_is_refused_in_words(weight, sampling):
    model = toy_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 0] = weight
    with pytest.raises(EngineError, match="logits are NaN or infinite in .* responses"):
        engine_of(model).generate(prompt_rows(), sampling, max_response_tokens=4, seed=0)


@pytest.mark.parametrize("withdraws", [False, True])
def test_rows_whose_prompts_were_being_read_at_an_interruption_are_kept_or_withdrawn(monkeypatch, withdraws):
    expected = engine_of(toy_model("llama")).generate(prompt_rows(), GREEDY, max_response_tokens=8, seed=0)
    engine = engine_of(toy_model("llama"))
    engine.submit(prompt_rows(), GREEDY, max_response_tokens=8, seed=0)
    with monkeypatch.context() as patched:
        patched.setattr(decode, "read_prompts", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.poll()
    if withdraws:
        assert len(engine.withdraw()) == len(prompt_rows()) and engine.num_running == 0
        engine.submit(prompt_rows(), GREEDY, max_response_tokens=8, seed=0)
    assert engine.num_running == len(prompt_rows())
    assert responses(engine.poll()) == responses(expected)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
