"""What arrived is compared with what was sent, at every transfer."""

from functools import partial

import pytest
import torch

from hybridflow.config.rollout import Transfer
from hybridflow.errors import StaleWeightsError
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding import verify
from hybridflow.resharding.executors.factory import make_executor
from hybridflow.resharding.resharder import Resharder
from tests.spmd import run_ranks
from tests.unit.resharding.random_weights import by_name
from tests.unit.resharding.resharding_programs import Faulty, Make, corrupted

FAULTY = partial(Faulty, rank=0, slot=3)


def weights(count: int, value: float) -> list[WeightShard]:
    return [WeightShard.full(f"w{number}", torch.full((4,), value)) for number in range(count)]


def resharder_of(
    held: list[WeightShard], slots: list[WeightShard], *, make: Make = make_executor, verify: bool = True
) -> Resharder:
    return Resharder(lambda: held, by_name(slots), group=None, transfer=Transfer(verify=verify), make=make)


def test_a_damaged_weight_is_named_on_every_rank_and_the_slots_count_as_incomplete():
    for message, is_complete, refusal in run_ranks(corrupted, 2):
        assert "After the transfer of version 7, [2:4, 0:8] of 'w' on rank 1 differs from what rank 1 holds." in message
        assert not is_complete
        assert "The rollout's weights are incomplete: a transfer failed" in refusal


def test_a_weight_kept_by_its_rank_is_compared_too():
    resharder = resharder_of(weights(5, 1.0), weights(5, 0.0), make=FAULTY)
    with pytest.raises(StaleWeightsError, match=r"version 1, \[0:4\] of 'w3' on rank 0 differs from what rank 0 holds"):
        resharder.transfer(1)
    assert not resharder.is_complete


def test_nothing_is_compared_when_not_asked_for():
    resharder = resharder_of(weights(5, 1.0), weights(5, 0.0), make=FAULTY, verify=False)
    assert resharder.transfer(1).bytes_verified == 0
    assert resharder.is_complete


def test_large_models_are_compared_a_share_at_a_time_and_every_weight_at_some_version(monkeypatch):
    monkeypatch.setattr(verify, "WHOLE_BYTES", 32)
    whole, caught = resharder_of(weights(10, 1.0), weights(10, 0.0)), []
    for version in range(5):
        assert whole.transfer(version).bytes_verified == 32
        try:
            resharder_of(weights(10, 1.0), weights(10, 0.0), make=FAULTY).transfer(version)
        except StaleWeightsError:
            caught.append(version)
    assert caught == [3]


def test_weights_in_place_need_no_comparison():
    shards = weights(3, 1.0)
    report = resharder_of(shards, shards).transfer(1)
    assert (report.bytes_verified, report.bytes_copied, report.bytes_aliased) == (0, 0, 48)
