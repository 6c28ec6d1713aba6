"""The actor with a low-rank adapter: samples of the merged model, and a reference that costs no memory."""

import torch

from hybridflow.config.model import Model
from hybridflow.config.training import Lora, Training
from hybridflow.controller.worker import WorkerContext
from hybridflow.workers.reference import ReferenceWorker
from tests.unit.workers.roles import actor, sampled

LORA = Lora(rank=4)


def updated(directory, steps: int = 3):
    """An actor with an adapter, some versions on, its weights published."""
    worker = actor(directory, lora=LORA)
    for version in range(1, steps + 1):
        worker.update(sampled(worker, seed=version))
        worker.publish_weights(version)
    return worker


def test_what_is_published_is_the_merged_model(toy_dir):
    worker = updated(toy_dir())
    batch = sampled(worker)
    assert batch.row("weight_version").unique().tolist() == [3]
    gap = batch.tokens("old_logprobs").values - batch.tokens("rollout_logprobs").values
    # float32: A and B apart in training, added to the weights in the rollout.
    assert float(gap.abs().max()) < 1e-4
    moved = batch.tokens("old_logprobs").values - worker.reference_logprobs(batch).tokens("ref_logprobs").values
    assert float(moved.abs().max()) > 0.01


def test_its_reference_is_the_model_that_a_reference_of_its_own_would_have_loaded(toy_dir):
    worker = updated(toy_dir())
    loaded = ReferenceWorker(
        WorkerContext("reference"), model=Model(path=str(toy_dir())), training=Training(), temperature=1.0
    )
    batch = sampled(worker)
    found = worker.reference_logprobs(batch).tokens("ref_logprobs").values
    assert torch.equal(found, loaded.logprobs(batch).tokens("ref_logprobs").values)


def test_a_transfer_copies_merged_weights_and_shares_the_others(toy_dir):
    worker = updated(toy_dir(), 1)
    metrics = worker.update(sampled(worker))
    parameters = dict(worker.engine.model.named_parameters())
    adapted = [weight for name, weight in parameters.items() if ".base_layer." in name]
    frozen = [weight for name, weight in parameters.items() if ".base_layer." not in name and "lora_" not in name]
    assert metrics["reshard/bytes_copied"].value == sum(weight.nbytes for weight in adapted)
    assert metrics["reshard/bytes_aliased"].value == sum(weight.nbytes for weight in frozen)
    assert metrics["reshard/bytes_moved"].value == 0
