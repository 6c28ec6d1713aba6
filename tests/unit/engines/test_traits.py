"""What engines declare: classes that can be made, and processes that start with their environment variables."""

import os

import pytest

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES, traits_of


def test_every_engine_of_the_configuration_is_declared():
    assert [*TRAINING_ENGINES] == [engine for engine in TrainingEngine if engine is not TrainingEngine.auto]
    assert [*ROLLOUT_ENGINES] == [*RolloutKind]


def test_auto_is_one_engine_on_one_device_and_another_on_several():
    assert traits_of(TrainingEngine.auto, 1) is TRAINING_ENGINES[TrainingEngine.single]
    assert traits_of(TrainingEngine.auto, 2) is TRAINING_ENGINES[TrainingEngine.fsdp]


@pytest.mark.parametrize(
    ("engine", "own", "found"),
    [(TrainingEngine.megatron, None, "1"), (TrainingEngine.megatron, "8", "8"), (TrainingEngine.fsdp, None, None)],
)
def test_cuda_starts_kernels_in_order_for_megatron_unless_the_user_sets_the_variable(monkeypatch, engine, own, found):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    TRAINING_ENGINES[engine].set_environment()
    assert os.environ.get(name) == found
