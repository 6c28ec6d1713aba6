"""What arrived is compared with what was sent, at every transfer."""

from collections.abc import Iterable

import pytest
import torch

from hybridflow.config.rollout import Transfer
from hybridflow.errors import StaleWeightsError
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding import verify
from hybridflow.resharding.executors.factory import make_executor
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.resharder import Resharder
from tests.spmd import run_ranks
from tests.unit.resharding.resharding_programs import corrupted


class ForgetsOne:
    """An executor after which one slot is as it was before."""

    def __init__(self, setup: ExecutorSetup) -> None:
        self._run = make_executor(setup).run

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        """What another executor does, but for weight `w3`."""
        slots = list(destination)
        before = slots[3].tensor.clone()
        report = self._run(source, slots)
        slots[3].tensor.copy_(before)
        return report


def weights(count: int, value: float) -> list[WeightShard]:
    return [WeightShard.full(f"w{number}", torch.full((4,), value)) for number in range(count)]


def slots_of(shards: Iterable[WeightShard]) -> dict[str, WeightShard]:
    return {shard.name: shard for shard in shards}


def test_a_damaged_weight_is_named_on_every_rank_and_the_slots_count_as_incomplete():
    for message, is_complete, refusal in run_ranks(corrupted, 2):
        assert "After the transfer of version 7, [0:2, 0:8] of 'w' on rank 1 differs from what rank 0 holds." in message
        assert not is_complete
        assert "The rollout's weights are incomplete: a transfer failed" in refusal


def test_a_weight_kept_by_its_rank_is_compared_too():
    resharder = Resharder(
        lambda: weights(5, 1.0), slots_of(weights(5, 0.0)), group=None, transfer=Transfer(), make=ForgetsOne
    )
    with pytest.raises(StaleWeightsError, match=r"version 1, \[0:4\] of 'w3' on rank 0 differs from what rank 0 holds"):
        resharder.transfer(1)
    assert not resharder.is_complete


def test_nothing_is_compared_when_not_asked_for():
    resharder = Resharder(
        lambda: weights(5, 1.0),
        slots_of(weights(5, 0.0)),
        group=None,
        transfer=Transfer(verify=False),
        make=ForgetsOne,
    )
    assert resharder.transfer(1).bytes_verified == 0
    assert resharder.is_complete


def test_large_models_are_compared_a_share_at_a_time(monkeypatch):
    monkeypatch.setattr(verify, "WHOLE_BYTES", 32)
    held, slots = weights(10, 1.0), weights(10, 0.0)
    resharder = Resharder(lambda: held, slots_of(slots), group=None, transfer=Transfer())
    assert [resharder.transfer(version).bytes_verified for version in range(5)] == [32] * 5


def test_every_weight_is_compared_at_some_version(monkeypatch):
    monkeypatch.setattr(verify, "WHOLE_BYTES", 32)
    caught = []
    for version in range(5):
        resharder = Resharder(
            lambda: weights(10, 1.0), slots_of(weights(10, 0.0)), group=None, transfer=Transfer(), make=ForgetsOne
        )
        try:
            resharder.transfer(version)
        except StaleWeightsError:
            caught.append(version)
    assert caught == [3]


def test_weights_in_place_need_no_comparison():
    shards = weights(3, 1.0)
    report = Resharder(lambda: shards, slots_of(shards), group=None, transfer=Transfer()).transfer(1)
    assert (report.bytes_verified, report.bytes_copied, report.bytes_aliased) == (0, 0, 48)
