"""The single engine on causal models: what it computes, how it steps, what it keeps."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Dtype
from hybridflow.config.training import Optimizer, Schedule
from hybridflow.engines.training import setup as engine_setup
from hybridflow.engines.training.interface import Loss, LossFn, Part
from hybridflow.errors import BatchError, EngineError
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard
from hybridflow.workers.objectives import Denominators, policy_objective
from tests.oracles import training as oracle
from tests.toys import TEMPERATURE, logprobs_of, numbers_like, sequences, stepped
from tests.unit.engines.training.engines import (
    is_freed_at_once,
    language_engine,
    largest_difference,
    likelihood_loss,
    squared_loss,
    value_engine,
    weights,
    with_returns,
)
from tests.unit.engines.training.late_link import LateLink

NUMBERS = ("advantages", "old_logprobs", "rollout_logprobs")


def plain_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def oracle_loss(model, row):
    logprobs, _ = oracle.response_logprobs(model, row, 0.7)
    return -(logprobs * row["response_mask"]).sum()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("microbatch_tokens", [1, 20, 4096])
def test_logprobs_and_entropy_are_those_of_each_row_alone(toy_dir, architecture, microbatch_tokens):
    batch, directory = sequences(), toy_dir(architecture)
    outputs = language_engine(directory, microbatch_tokens=microbatch_tokens).forward(
        batch, ("logprobs", "entropy"), temperature=TEMPERATURE
    )
    model = plain_model(directory)
    for i, row in enumerate(oracle.rows_of(batch)):
        with torch.no_grad():
            logprobs, entropies = oracle.response_logprobs(model, row, 0.7)
        # float32: sums over 64 columns in another order.
        assert torch.allclose(outputs.tokens("logprobs").row(i), logprobs, atol=1e-5)
        assert torch.allclose(outputs.tokens("entropy").row(i), entropies, atol=1e-5)


@pytest.mark.parametrize("microbatch_tokens", [1, 4096])
@pytest.mark.parametrize("rewritten", [0, 40], ids=["another prompt", "the same beginning"])
def test_logprobs_of_a_fork_are_those_of_its_own_prompt_alone(toy_dir, microbatch_tokens, rewritten):
    batch = sequences((50, 50), (70, 4))
    (first, second), model = oracle.rows_of(batch), plain_model(toy_dir())
    prompt, response = first["prompt_ids"], first["response_ids"]
    response[4 : 4 + rewritten] = prompt[:rewritten]  # a fork of 60 prompt tokens begins at 4
    batch = batch.with_columns(tokens={"fork_starts": Ragged.from_rows([[4], []], torch.int64)})
    outputs = language_engine(toy_dir(), microbatch_tokens=microbatch_tokens).forward(
        batch, ("logprobs",), temperature=TEMPERATURE
    )
    rows = [(0, 0, prompt, response[:4]), (0, 64, response[4:64], response[64:])]
    rows.append((1, 0, second["prompt_ids"], second["response_ids"]))
    for row, start, prompt_ids, response_ids in rows:
        alone = {"prompt_ids": prompt_ids, "response_ids": response_ids}
        expected, _ = oracle.response_logprobs(model, alone, TEMPERATURE)
        found = outputs.tokens("logprobs").row(row)[start : start + len(response_ids)]
        assert torch.allclose(found, expected, atol=1e-5)  # float32: packed against alone


def test_a_batch_without_responses_is_an_error_that_names_them(toy_dir):
    with pytest.raises(BatchError, match="response_ids"):
        logprobs_of(language_engine(toy_dir()), sequences().only(["prompt_ids"]))


def test_a_models_dropout_is_off_even_with_gradient_checkpointing(toy_dir):
    directory = toy_dir("llama", attention_dropout=0.5)
    batch = sequences()
    expected = logprobs_of(language_engine(directory), batch).values
    found = logprobs_of(language_engine(directory, gradient_checkpointing=True), batch).values
    assert torch.equal(found, expected)


def test_gradient_checkpointing_keeps_fewer_activations_and_gives_the_same_weights(toy_dir):
    plain, saving = language_engine(toy_dir()), language_engine(toy_dir(), gradient_checkpointing=True)
    saved_bytes = []
    for engine in (plain, saving):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            stepped(engine, sequences(), likelihood_loss)
        saved_bytes.append(sum(sizes))
    assert saved_bytes[1] < saved_bytes[0]
    assert largest_difference(weights(plain), weights(saving)) == 0.0


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_the_gradient_is_clipped_to_its_global_norm(toy_dir, max_grad_norm):
    # An epsilon far above the gradient makes AdamW's first step proportional to it.
    config = Optimizer(learning_rate=10.0, epsilon=100.0, max_grad_norm=max_grad_norm)
    batch, directory = sequences(), toy_dir()
    engine, model = language_engine(directory, optimizer=config), plain_model(directory)
    found = stepped(engine, batch, likelihood_loss)
    (norm,) = oracle.train(model, [oracle.rows_of(batch)], oracle_loss, config)
    assert found["grad_norm"].value == pytest.approx(norm, rel=1e-4)
    assert norm > 1.0
    assert largest_difference(weights(engine), dict(model.named_parameters())) < 1e-5


def test_the_learning_rate_follows_the_schedule_and_goes_on_where_it_was(toy_dir, tmp_path):
    config = Optimizer(learning_rate=0.4, warmup_steps=2, schedule=Schedule.linear, epsilon=1e-3)
    engine, again = (language_engine(toy_dir(), optimizer=config, steps=6) for _ in range(2))
    rates = [stepped(engine, sequences(), likelihood_loss)["lr"].value for _ in range(3)]
    engine.save(tmp_path)
    again.load(tmp_path)
    assert all(group["step"] == 3 for group in again.optimizer.param_groups)  # for TransformerEngine's AdamW
    rates += [stepped(again, sequences(), likelihood_loss)["lr"].value for _ in range(3)]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("make", "architecture", "steps", "dtype"),
    [
        (language_engine, "llama", 2, Dtype.float32),
        (language_engine, "llama", 0, Dtype.float32),
        (language_engine, "llama", 1, Dtype.bfloat16),
        (language_engine, "qwen3_moe", 1, Dtype.float32),
        (language_engine, "qwen3_moe", 1, Dtype.bfloat16),
        (value_engine, "llama", 2, Dtype.float32),
    ],
)
def test_what_is_saved_comes_back_bit_for_bit_and_training_goes_on_the_same(
    toy_dir, tmp_path, make, architecture, steps, dtype
):
    loss = likelihood_loss if make is language_engine else squared_loss
    engine = make(toy_dir(architecture), dtype=dtype)
    for seed in range(steps):
        stepped(engine, with_returns(seed), loss)
    engine.save(tmp_path)
    again = make(toy_dir(architecture, seed=1), dtype=dtype)
    again.load(tmp_path)
    assert largest_difference(weights(again), weights(engine)) == 0.0
    for each in (engine, again):
        stepped(each, with_returns(2), loss)
    assert largest_difference(weights(again), weights(engine)) == 0.0


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("steps", "dtype"), [(0, Dtype.float32), (2, Dtype.float32), (1, Dtype.bfloat16)])
def test_a_snapshot_is_restored_bit_for_bit_and_training_goes_on_the_same(toy_dir, steps, dtype, is_new):
    engine = language_engine(toy_dir(), dtype=dtype)
    for seed in range(steps):
        stepped(engine, sequences(seed=seed), likelihood_loss)
    kept, rows = engine.snapshot(), sequences(seed=5)
    stepped(engine, rows, likelihood_loss)
    wanted = weights(engine)
    stepped(engine, sequences(seed=6), likelihood_loss)
    restored = language_engine(toy_dir(seed=1), dtype=dtype) if is_new else engine
    restored.roll_back(kept)
    assert restored.steps == steps
    stepped(restored, rows, likelihood_loss)
    assert largest_difference(weights(restored), wanted) == 0.0


def test_an_architecture_without_known_names_is_saved_by_transformers_and_goes_on_the_same(toy_dir, tmp_path):
    gemma = partial(toy_dir, "gemma2", tie_word_embeddings=True)
    engine = language_engine(gemma())
    stepped(engine, sequences(), likelihood_loss)
    engine.save(tmp_path)
    again = language_engine(gemma())
    again.load(tmp_path)
    for each in (engine, again):
        stepped(each, sequences(seed=1), likelihood_loss)
    assert largest_difference(weights(engine), weights(again)) == 0.0
    other = language_engine(gemma(intermediate_size=40))
    with pytest.raises(EngineError, match=r"(?s)belongs to a different model.*model\.path"):
        other.load(tmp_path)


def test_bound_parameters_are_views_of_the_slots_and_stay_so(toy_dir, tmp_path):
    engine = language_engine(toy_dir())
    before = weights(engine)
    slots = {name: WeightShard.full(name, torch.zeros_like(weight)) for name, weight in before.items()}
    assert engine.bind(slots) == slots.keys()
    held = {name: shard.tensor for name, shard in slots.items()}
    assert largest_difference(held, before) == 0.0

    stepped(engine, sequences(), likelihood_loss)
    assert largest_difference(held, weights(engine)) == 0.0
    assert largest_difference(held, before) > 0.0

    engine.save(tmp_path)
    stepped(engine, sequences(), likelihood_loss)
    engine.load(tmp_path)
    assert largest_difference(held, weights(engine)) == 0.0
    assert all(parameter.data_ptr() == held[name].data_ptr() for name, parameter in engine.model.named_parameters())


def test_stacked_experts_are_bound_where_the_slots_are_stacked_the_same_way(toy_dir):
    engine = language_engine(toy_dir("qwen3_moe"))
    batch, twin = sequences(), language_engine(toy_dir("qwen3_moe"))
    stacked = {name: torch.zeros_like(weight) for name, weight in engine.model.named_parameters()}
    slots = {
        shard.name: shard
        for name, tensor in stacked.items()
        for shard in views(tensor.detach(), parts_of(name, tensor.shape))
    }
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in slots
    assert engine.bind(slots) == slots.keys()
    for each in (engine, twin):
        stepped(each, batch, likelihood_loss)
    assert largest_difference(stacked, weights(twin)) == 0.0

    apart = {name: WeightShard.full(name, shard.tensor.clone()) for name, shard in slots.items()}
    assert not {name for name in twin.bind(apart) if ".experts." in name}


def test_what_waits_on_the_host_is_not_on_the_device_in_a_pass_and_changes_no_number(toy_dir, tmp_path, monkeypatch):
    link = LateLink()
    settings = {"dtype": Dtype.bfloat16, "offload_optimizer": True}
    twin = language_engine(toy_dir(), **settings)
    monkeypatch.setattr(engine_setup, "host_link", lambda device: link)
    engine = language_engine(toy_dir(), **settings)

    def watched(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        assert all(link.holds(master) for master in engine.optimizer.weight_of), "float32 copies are on the device"
        return likelihood_loss(outputs, columns)

    for seed in range(4):
        # Weights that come back are NaN until they are waited for.
        engine.offload(Part.parameters)
        assert logprobs_of(engine, sequences(seed=seed)).values.isfinite().all()
        stepped(engine, sequences(seed=seed), LossFn(likelihood_loss.outputs, watched))
        stepped(twin, sequences(seed=seed), likelihood_loss)
        if seed == 1:
            engine.save(tmp_path)
            engine = language_engine(toy_dir(seed=1), **settings)
            engine.load(tmp_path)
    assert largest_difference(weights(engine), weights(twin)) == 0.0
    places = link.reserved_bytes
    engine.onload(*Part)
    engine.offload(*Part)
    assert link.reserved_bytes == places


def test_what_was_away_before_it_was_saved_or_loaded_is_away_again(toy_dir, tmp_path):
    engine = language_engine(toy_dir())
    engine.offload(*Part)
    engine.save(tmp_path)
    assert engine.away == set(Part)
    engine.load(tmp_path)
    assert engine.away == set(Part)
    list(engine.weight_shards())
    assert engine.away == {Part.optimizer}


def test_gradients_of_bfloat16_weights_add_up_in_float32(toy_dir):
    engine = language_engine(toy_dir(), dtype=Dtype.bfloat16, microbatch_tokens=1)
    one = sequences((3,), (5,))
    alone = stepped(engine, one, likelihood_loss)["grad_norm"].value
    many = language_engine(toy_dir(), dtype=Dtype.bfloat16, microbatch_tokens=1)
    norm = stepped(many, Batch.concat([one] * 37), likelihood_loss)["grad_norm"].value
    # The same gradient 37 times; sums in bfloat16 would be rounded to 1 part in 256 again and again.
    assert norm == pytest.approx(37 * alone, rel=1e-5)


def test_rows_without_a_response_train_like_none(toy_dir):
    prompts, responses = (3, 1, 7, 4), (5, 0, 2, 1)
    algorithm, norms = Algorithm(), []
    for rows in ([0, 1, 2, 3], [0, 2, 3]):
        ids = sequences(prompts, responses)
        numbers = {name: numbers_like(ids.tokens("response_ids"), seed=1) for name in NUMBERS}
        batch = ids.with_columns(tokens=numbers).select(torch.tensor(rows))
        loss = policy_objective(algorithm, Denominators.of(batch), norm_tokens=8)
        engine = language_engine(toy_dir(), microbatch_tokens=1)
        norms.append(stepped(engine, batch, loss)["grad_norm"].value)
    assert norms[0] == norms[1] > 0


def test_a_frozen_model_has_no_optimizer(toy_dir):
    engine = language_engine(toy_dir(), steps=0)
    logprobs_of(engine, sequences())
    assert engine.made_optimizer is None


@pytest.mark.parametrize("offloads", [False, True])
def test_an_engine_without_references_is_freed_at_once(toy_dir, monkeypatch, offloads):
    if offloads:
        monkeypatch.setattr(engine_setup, "host_link", lambda device: LateLink())
    settings = {"dtype": Dtype.bfloat16, "offload_optimizer": offloads}
    assert is_freed_at_once(lambda: language_engine(toy_dir(), **settings), sequences())


@pytest.mark.parametrize(("architecture", "free"), [("llama", 0), ("gemma2", 1 << 40)], ids=["no memory", "no names"])
def test_what_cannot_be_copied_is_written_before_training_continues(
    toy_dir, tmp_path, monkeypatch, caplog, architecture, free
):
    engine = language_engine(toy_dir(architecture))
    memory = SimpleNamespace(available=free, total=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    write = engine.save_later(tmp_path)
    before = load_file(tmp_path / "huggingface" / "model.safetensors")
    stepped(engine, sequences(), likelihood_loss)
    write()
    after = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    warnings = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    assert [("0.0 GiB are free. Set trainer.async_save=false" in warning) for warning in warnings] == [True] * (
        not free
    )
